"""The language model: pure functions over nested dicts of arrays.

Building one splits the NNX graph of `transformer.Transformer` into a definition per part and the declarations of its
parameters, once. From then on parameters are plain nested dicts, with the blocks' arrays stacked along `layers`, and a part
is put together with its arrays at the moment of use: cast and laid out by `shard.use`, inside the loop for a block, so that
no more than one block's gathered weights need to exist at a time.

One block function serves the loop, the unrolled form and decoding. What differs from layer to layer besides parameters (the
layer's number and its attention window) is scanned along with them.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.config import ModelConfig
from jaxlm.models import dropout as dropout_sites
from jaxlm.models import parameters, rematerialisation, rope
from jaxlm.models.dropout import Dropout
from jaxlm.models.transformer import NO_WINDOW, STREAM, WHOLE, Shared, Transformer, enter
from kernels.attention import UnsupportedError, check_name
from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import is_worthwhile, linear_cross_entropy
from kernels.matmul import add_bias
from partitioning import paths
from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.unsharded import UNSHARDED

LOGITS = ("batch", "length", "vocab")


class Sums(NamedTuple):
    """Float32 sums over target tokens, never means: add them up over microbatches and devices, then divide by `targets`.

    What is minimised is (loss + z_loss) / targets.
    """
    loss: jax.Array
    z_loss: jax.Array
    targets: jax.Array


def build_model(config: ModelConfig, *, param_dtype: Any = "float32", compute_dtype: Any = "float32",
                gradient_dtype: Any = "float32", remat: tuple[str, ...] = ("dots",),
                attention_backend: str = "auto", cross_entropy_form: str = "auto", interpret: bool = False,
                padding: Mapping[str, int] = types.MappingProxyType({})) -> "LanguageModel":
    """The model of a configuration. Needs no device and no memory.

    `padding` makes dims larger than they are (dim to size, of `padding.padded_sizes`); the model computes what it does without.

    Raises:
      DeclarationError: an unknown rematerialisation, RoPE scaling or attention backend.
    """
    rematerialisation.check(tuple(remat))
    try:
        check_name(attention_backend)
    except UnsupportedError as error:
        raise DeclarationError(f"config.kernels.attention: {error}") from None
    if config.position == "rope":
        rope.frequencies(config.rotated_width, config.rope_theta, config.rope_scaling)    # for what it raises
    module = Transformer(config)
    declared = parameters.declarations(module)
    graphs = {part: nnx.split(getattr(module, part))[0] for part in dict.fromkeys(path.split("/")[0] for path in declared)}
    return LanguageModel(config, parameters.specs(declared, param_dtype, config.num_layers, padding), jnp.dtype(compute_dtype),
                         jnp.dtype(gradient_dtype), tuple(remat), attention_backend, cross_entropy_form, interpret, dict(padding),
                         declared, graphs)


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """See the module. All methods are pure and can be traced.

    Attributes:
      specs: nested dict of ArraySpec: every parameter.
    """
    config: ModelConfig
    specs: dict[str, Any]
    compute_dtype: Any
    gradient_dtype: Any
    remat: tuple[str, ...]
    attention_backend: str
    cross_entropy_form: str
    interpret: bool
    _padding: dict[str, int]
    _declared: dict[str, nnx.Param]
    _graphs: dict[str, nnx.GraphDef]

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters; under jit bitwise the same for every sharding of the result."""
        return parameters.initialise(self._declared, key, self.specs)

    def activations(self, batch: int, length: int) -> dict[str, ArraySpec]:
        """The activations that are constrained, by name; for checking that a layout fits them."""
        c, dtype = self.config, self.compute_dtype
        rows = ("batch", "length")
        arrays = {
            "tokens": ArraySpec((batch, length), jnp.dtype("int32"), rows),
            "stream": ArraySpec((batch, length, c.embed_dim), dtype, STREAM),
            "normed": ArraySpec((batch, length, c.embed_dim), dtype, WHOLE),
            "query": ArraySpec((batch, length, c.num_heads, c.head_width), dtype, (*rows, "heads", "head_dim")),
            "key": ArraySpec((batch, length, c.kv_heads, c.head_width), dtype, (*rows, "kv_heads", "head_dim")),
            "mlp": ArraySpec((batch, length, c.mlp_dim), dtype, (*rows, "mlp")),
            "logits": ArraySpec((batch, length, c.vocab_size), jnp.dtype("float32"), (*rows, "vocab")),
        }
        return {name: array.padded(self._padding) for name, array in arrays.items()}

    def logits(self, params: Mapping, tokens_BL: jax.Array, *, positions_BL: jax.Array | None = None,
               segment_ids_BL: jax.Array | None = None, dropout: tuple[jax.Array, jax.Array] | None = None,
               shard: Any = UNSHARDED) -> jax.Array:
        """Logits of the token after each place.

        Args:
          params: as `specs`.
          tokens_BL: int32 in [0, vocab_size).
          positions_BL: int32; None counts from 0 in each row.
          segment_ids_BL: int32; a token attends to its own segment only, and ids below 1 are padding. None: one segment.
          dropout: (the step's key, int32 [B] row numbers in the global batch), or None for none.
          shard: a bound Layout, or UNSHARDED.

        Returns:
          float32 [B, L, V], without any padding of V.
        """
        logits_BLV, _ = self._forward(params, tokens_BL, positions_BL, segment_ids_BL, self._masks(dropout), shard)
        return logits_BLV[..., :self.config.vocab_size]

    def loss(self, params: Mapping, batch: Mapping[str, jax.Array], *, dropout: tuple[jax.Array, jax.Array] | None = None,
             z_loss: float = 0.0, shard: Any = UNSHARDED) -> Sums:
        """Cross-entropy of `batch['targets']` where `batch['mask']` holds; a batch without targets gives zeros.

        Args:
          batch: inputs, targets int32 [B, L]; mask bool [B, L]; perhaps positions and segment_ids int32 [B, L].
          z_loss: weight of the squared log-partition; the sum that is returned has it already.
        """
        x_BLD = self.enter(params, batch, dropout, shard)
        along = self.along_layers()
        x_BLD = self.blocks(shard.stack(params["layers"], "layers"), along, x_BLD, batch, dropout, shard)
        return self.sums(params, x_BLD, batch, z_loss=z_loss, shard=shard)

    # The parts that `loss` is made of, for a pipeline to do each of them elsewhere.

    def enter(self, params: Mapping, batch: Mapping[str, jax.Array], dropout: Any, shard: Any) -> jax.Array:
        """The residual stream [B, L, D] before the first block. Reads all parameters but `layers`."""
        return self._embed(params, batch["inputs"], batch.get("positions"), self._masks(dropout), shard)

    def along_layers(self) -> dict[str, jax.Array]:
        """Facts of each layer that go through the loop along with its parameters: arrays [layers]."""
        out, windows = {"number": jnp.arange(self.config.num_layers, dtype=jnp.int32)}, self.config.windows()
        if not self._alike:
            out["window"] = jnp.array([NO_WINDOW if w is None else w for w in windows], jnp.int32)
        return out

    def blocks(self, layers: Mapping, along: Mapping[str, jax.Array], x_BLD: jax.Array, batch: Mapping[str, jax.Array],
               dropout: Any, shard: Any) -> jax.Array:
        """The stream after some consecutive blocks: `layers` and `along` hold theirs, stacked."""
        shared = self._shared(shard, x_BLD.shape[1], batch.get("positions"), batch.get("segment_ids"), self._masks(dropout))
        return self._layers(layers, along, x_BLD, shared, None)[0]

    def sums(self, params: Mapping, x_BLD: jax.Array, batch: Mapping[str, jax.Array], *, z_loss: float, shard: Any) -> Sums:
        """What `loss` returns, from the stream after the last block. Reads all parameters but `layers`."""
        part, x_BLD = self._last(params, x_BLD, shard)
        spec = shard.activation(LOGITS)
        V = self._padding.get("vocab", self.config.vocab_size)
        worthwhile = is_worthwhile(batch["targets"].size, V, shard.mesh, spec)
        if self.cross_entropy_form == "chunked" or self.cross_entropy_form == "auto" and worthwhile:
            loss, penalty = linear_cross_entropy(
                x_BLD, part.matrix, batch["targets"], batch["mask"], tied=self.config.tie_embeddings, size=self.config.vocab_size,
                softcap=self.config.logit_softcap, z_loss=z_loss, mesh=shard.mesh, spec=spec)
            return Sums(loss, penalty, jnp.sum(batch["mask"], dtype=jnp.float32))
        loss_BL, log_z_BL = cross_entropy(self._logits(part, x_BLD, shard), batch["targets"], self.config.vocab_size)

        def total(x_BL):
            return jnp.sum(jnp.where(batch["mask"], x_BL, 0.0), dtype=jnp.float32)

        penalty = z_loss * total(jnp.square(log_z_BL)) if z_loss else jnp.zeros((), jnp.float32)
        return Sums(total(loss_BL), penalty, total(jnp.ones_like(loss_BL)))

    def init_cache(self, batch: int, length: int) -> dict[str, jax.Array]:
        """An empty cache for `length` tokens per row: key and value [layers, B, S, G, K], length int32 [B]."""
        c = self.config
        if length > c.max_positions:
            raise DeclarationError(f"a cache of {length} tokens is longer than config.model.max_positions = {c.max_positions}.")
        shape = (c.num_layers, batch, length, self._padding.get("kv_heads", c.kv_heads), c.head_width)
        return {"key": jnp.zeros(shape, self.compute_dtype), "value": jnp.zeros(shape, self.compute_dtype),
                "length": jnp.zeros((batch,), jnp.int32)}

    def decode(self, params: Mapping, tokens_BT: jax.Array, cache: Mapping[str, jax.Array], *, length=None,
               shard: Any = UNSHARDED) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Goes on from a cache: a whole prompt (T tokens) or one token per row.

        Args:
          tokens_BT: int32. Rows may be padded at their end.
          cache: of `init_cache` or of the call before. No row may grow past its size.
          length: how many of the T tokens count; an int32 scalar or int32 [B]. None: all.

        Returns:
          float32 logits [B, T, V] (of no meaning in padding), and the cache with the tokens that count.
        """
        offset_B, T = cache["length"], tokens_BT.shape[1]
        positions_BT = offset_B[:, None] + jnp.arange(T, dtype=jnp.int32)
        logits_BTV, layers = self._forward(params, tokens_BT, positions_BT, None, Dropout(), shard, cache)
        # Keys of padding lie past the new length, where causality hides them until other tokens take their place.
        length = offset_B + (T if length is None else length)
        return logits_BTV[..., :self.config.vocab_size], {**layers, "length": length}

    def _masks(self, dropout):
        return Dropout(self.config.dropout, *dropout) if dropout is not None else Dropout()

    def _forward(self, params, tokens_BL, positions_BL, segment_ids_BL, masks, shard, cache=None):
        """Logits as large as the padded vocabulary, and the layers' keys and values (None without a cache)."""
        x_BLD = self._embed(params, tokens_BL, positions_BL, masks, shard)
        shared = self._shared(shard, tokens_BL.shape[1], positions_BL, segment_ids_BL, masks, cache)
        x_BLD, cache = self._layers(shard.stack(params["layers"], "layers"), self.along_layers(), x_BLD, shared, cache)
        return self._head(params, x_BLD, shard), cache

    def _embed(self, params, tokens_BL, positions_BL, masks, shard):
        c, L = self.config, tokens_BL.shape[1]
        if positions_BL is None and L > c.max_positions:
            raise DeclarationError(f"a sequence of {L} tokens is longer than config.model.max_positions = {c.max_positions}.")
        # Whole in length first: rows are then looked up where they lie and summed, and the table is never gathered.
        x_BLD = shard.constrain(self._part("embed", params, shard)(tokens_BL).astype(self.compute_dtype), WHOLE)
        if c.embed_scale != 1:
            x_BLD = x_BLD * jnp.asarray(c.embed_scale, x_BLD.dtype)
        if c.position == "learned":
            table = self._part("positions", params, shard)
            # The first rows, whole: split along the length, the compiler would fetch them from each other by permutes.
            rows = shard.constrain(table.first(L), (None, "embed")) if positions_BL is None else table(positions_BL)
            x_BLD = add_bias(x_BLD, rows)
        return shard.constrain(masks(x_BLD, 0, dropout_sites.EMBEDDING), STREAM)

    def _shared(self, shard, length, positions_BL, segment_ids_BL, masks, cache=None):
        c, rotation, local_rotation = self.config, None, None
        if c.position == "rope":
            positions = jnp.arange(length) if positions_BL is None else positions_BL
            longest = length if cache is None else cache["key"].shape[2]
            frequencies = rope.frequencies(c.rotated_width, c.rope_theta, c.rope_scaling, longest)
            rotation = rope.angles(positions, frequencies, rope.amplitude(c.rope_scaling))
            if c.rope_local_theta is not None:
                local_rotation = rope.angles(positions, rope.frequencies(c.rotated_width, c.rope_local_theta))
        return Shared(shard, rotation, segment_ids_BL, masks, 0 if cache is None else cache["length"], self.attention_backend,
                      self.interpret, local_rotation)

    def _head(self, params, x_BLD, shard):
        return self._logits(*self._last(params, x_BLD, shard), shard)

    def _last(self, params, x_BLD, shard):
        """The part with the output matrix, and what it is given."""
        x_BLD = enter(self._part("final_norm", params, shard)(x_BLD), shard)
        # A tied table is used anew: each use's gradient is then scattered by itself, instead of being held whole for the other.
        return self._part("embed" if self.config.tie_embeddings else "lm_head", params, shard), x_BLD

    def _logits(self, part, x_BLD, shard):
        c = self.config
        logits_BLV = shard.constrain(part.logits(x_BLD), LOGITS)
        if c.logit_softcap is not None:
            logits_BLV = c.logit_softcap * jnp.tanh(logits_BLV / c.logit_softcap)
        return logits_BLV

    def _part(self, name, params, shard):
        return nnx.merge(self._graphs[name], self._use(shard, params[name], name))

    @property
    def _alike(self) -> bool:
        """Whether all layers have the same window, which is then static and costs nothing to mask with."""
        return len(set(self.config.windows())) == 1

    def _use(self, shard, params, prefix):
        return shard.use(params, prefix, self.compute_dtype, self.gradient_dtype)

    def _layers(self, stacked, along, x_BLD, shared, cache):
        """Some blocks in turn, looped or unrolled."""
        c = self.config
        copied = [spec.shape[1:] for path, spec in paths.flatten(self.specs["layers"]).items()
                  if shared.shard.copies(paths.join("layers", path), spec.dtype, self.compute_dtype)]
        if cache is not None:
            cache = {"key": cache["key"], "value": cache["value"]}

        def run(x_BLD, params, facts, cache):
            weights = self._use(shared.shard, params, "layers")
            window = facts.get("window", c.windows()[0])
            return nnx.merge(self._graphs["layers"], weights)(x_BLD, shared.in_layer(window), facts["number"], window, cache)

        block = run if cache is not None else rematerialisation.apply(run, self.remat, looped=c.scan_layers, copied=copied)
        if c.scan_layers:
            return jax.lax.scan(lambda x_BLD, layer: block(x_BLD, *layer), x_BLD, (stacked, along, cache))
        caches, count = [], len(along["number"])
        windows = c.windows() if count == c.num_layers else None       # static where the layers are known
        for i, (params, facts, own_cache) in enumerate(_unstack((stacked, along, cache), count)):
            facts = facts if windows is None else {**facts, "window": windows[i]}
            x_BLD, own_cache = block(x_BLD, params, facts, own_cache)
            caches.append(own_cache)
        return x_BLD, None if cache is None else jax.tree.map(lambda *layers: jnp.stack(layers), *caches)


def _unstack(tree, count):
    """`count` trees of slices along the leading dim. (The gradient of a split is one concatenation; indexing would add up
    `count` arrays of full size.)"""
    leaves, structure = jax.tree.flatten(tree)
    split = [[jnp.squeeze(piece, 0) for piece in jax.lax.split(leaf, [1] * count)] for leaf in leaves]
    return [structure.unflatten(pieces) for pieces in zip(*split)]

