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
from jaxlm.models.transformer import STREAM, WHOLE, Shared, Transformer, enter
from kernels.attention import UnsupportedError, check_name
from kernels.cross_entropy import cross_entropy
from kernels.matmul import add_bias
from partitioning import paths
from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.unsharded import UNSHARDED

NO_WINDOW = 2 ** 30                            # longer than any sequence: 'all' where windows differ from layer to layer


class Sums(NamedTuple):
    """Float32 sums over target tokens, never means: add them up over microbatches and devices, then divide by `targets`.

    What is minimised is (loss + z_loss) / targets.
    """
    loss: jax.Array
    z_loss: jax.Array
    targets: jax.Array


def build_model(config: ModelConfig, *, param_dtype: Any = "float32", compute_dtype: Any = "float32",
                gradient_dtype: Any = "float32", remat: tuple[str, ...] = ("dots",),
                attention_backend: str = "auto",
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
    frequencies = None
    if config.position == "rope":
        frequencies = rope.frequencies(config.head_width, config.rope_theta, config.rope_scaling)
    module = Transformer(config)
    declared = parameters.declarations(module)
    graphs = {part: nnx.split(getattr(module, part))[0] for part in dict.fromkeys(path.split("/")[0] for path in declared)}
    return LanguageModel(config, parameters.specs(declared, param_dtype, config.num_layers, padding), jnp.dtype(compute_dtype),
                         jnp.dtype(gradient_dtype), tuple(remat), attention_backend, dict(padding), declared, graphs, frequencies)


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
    _padding: dict[str, int]
    _declared: dict[str, nnx.Param]
    _graphs: dict[str, nnx.GraphDef]
    _frequencies: Any

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
        logits_BLV = self._logits(params, tokens_BL, positions_BL, segment_ids_BL, dropout, shard)
        return logits_BLV[..., :self.config.vocab_size]

    def loss(self, params: Mapping, batch: Mapping[str, jax.Array], *, dropout: tuple[jax.Array, jax.Array] | None = None,
             z_loss: float = 0.0, shard: Any = UNSHARDED) -> Sums:
        """Cross-entropy of `batch['targets']` where `batch['mask']` holds; a batch without targets gives zeros.

        Args:
          batch: inputs, targets int32 [B, L]; mask bool [B, L]; perhaps positions and segment_ids int32 [B, L].
          z_loss: weight of the squared log-partition; the sum that is returned has it already.
        """
        logits_BLV = self._logits(params, batch["inputs"], batch.get("positions"), batch.get("segment_ids"), dropout, shard)
        loss_BL, log_z_BL = cross_entropy(logits_BLV, batch["targets"], self.config.vocab_size)

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

    def _logits(self, params, tokens_BL, positions_BL, segment_ids_BL, dropout, shard):
        """Logits of whole sequences, as large as the padded vocabulary."""
        masks = Dropout(self.config.dropout, *dropout) if dropout is not None else Dropout()
        return self._forward(params, tokens_BL, positions_BL, segment_ids_BL, masks, shard)[0]

    def _forward(self, params, tokens_BL, positions_BL, segment_ids_BL, masks, shard, cache=None):
        """Logits, and the layers' keys and values (None without a cache)."""
        c = self.config
        L = tokens_BL.shape[1]
        if positions_BL is None and L > c.max_positions:
            raise DeclarationError(f"a sequence of {L} tokens is longer than config.model.max_positions = {c.max_positions}.")

        def part(name):
            return nnx.merge(self._graphs[name], self._use(shard, params[name], name))

        # Whole in length first: rows are then looked up where they lie and summed, and the table is never gathered.
        x_BLD = shard.constrain(part("embed")(tokens_BL).astype(self.compute_dtype), WHOLE)
        if c.position == "learned":
            table = part("positions")
            x_BLD = add_bias(x_BLD, table.first(L) if positions_BL is None else table(positions_BL))
        x_BLD = shard.constrain(masks(x_BLD, 0, dropout_sites.EMBEDDING), STREAM)
        rotation = None
        if c.position == "rope":
            rotation = rope.angles(jnp.arange(L) if positions_BL is None else positions_BL, self._frequencies)
        shared = Shared(shard, rotation, segment_ids_BL, masks, 0 if cache is None else cache["length"], self.attention_backend)
        x_BLD, cache = self._layers(shard.stack(params["layers"], "layers"), x_BLD, shared, cache)
        x_BLD = enter(part("final_norm")(x_BLD), shard)
        # A tied table is used anew: each use's gradient is then scattered by itself, instead of being held whole for the other.
        logits_BLV = part("embed" if c.tie_embeddings else "lm_head").logits(x_BLD)
        logits_BLV = shard.constrain(logits_BLV, ("batch", "length", "vocab"))
        if c.logit_softcap is not None:
            logits_BLV = c.logit_softcap * jnp.tanh(logits_BLV / c.logit_softcap)
        return logits_BLV, cache

    def _use(self, shard, params, prefix):
        return shard.use(params, prefix, self.compute_dtype, self.gradient_dtype)

    def _layers(self, stacked, x_BLD, shared, cache):
        """All blocks in turn, looped or unrolled."""
        c = self.config
        windows = c.windows()
        alike = len(set(windows)) == 1         # then the window is static and costs nothing to mask with
        gathered = [spec.shape[1:] for path, spec in paths.flatten(self.specs["layers"]).items()
                    if shared.shard.gathers(paths.join("layers", path))]
        if cache is not None:
            cache = {"key": cache["key"], "value": cache["value"]}

        def block(window):
            def run(x_BLD, params, layer, cache):
                weights = self._use(shared.shard, params, "layers")
                return nnx.merge(self._graphs["layers"], weights)(x_BLD, shared, layer, window, cache)

            if cache is not None:
                return run
            return rematerialisation.apply(run, self.remat, looped=c.scan_layers, gathered=gathered)

        numbers = jnp.arange(c.num_layers, dtype=jnp.int32)
        if c.scan_layers:
            scanned = None if alike else jnp.array([NO_WINDOW if w is None else w for w in windows], jnp.int32)

            def body(x_BLD, along):
                params, number, window, cache = along
                return block(windows[0] if alike else window)(x_BLD, params, number, cache)

            return jax.lax.scan(body, x_BLD, (stacked, numbers, scanned, cache))
        caches = []
        for window, (params, number, own_cache) in zip(windows, _unstack((stacked, numbers, cache), c.num_layers)):
            x_BLD, own_cache = block(window)(x_BLD, params, number, own_cache)
            caches.append(own_cache)
        return x_BLD, None if cache is None else jax.tree.map(lambda *layers: jnp.stack(layers), *caches)


def _unstack(tree, count):
    """`count` trees of slices along the leading dim. (The gradient of a split is one concatenation; indexing would add up
    `count` arrays of full size.)"""
    leaves, structure = jax.tree.flatten(tree)
    split = [[jnp.squeeze(piece, 0) for piece in jax.lax.split(leaf, [1] * count)] for leaf in leaves]
    return [structure.unflatten(pieces) for pieces in zip(*split)]

