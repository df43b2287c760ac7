"""The decoder-only Transformer as Flax NNX modules, from the smallest part to the whole.

A module declares its parameters (`jaxlm.models.parameters`) and says what it computes from them; it never holds numbers
of its own. `jaxlm.models.language_model` splits the graph once and afterwards puts arrays in where they are used. The
options span GPT-2 (Radford et al. 2019: LayerNorm, learned positions, plain MLP, biases, tied embeddings), Llama 3
(Grattafiori et al. 2024, arXiv:2407.21783: RMSNorm, RoPE, gated MLP, grouped-query attention) and what later families added
to them, each as an option of its own (`jaxlm.huggingface.families` says which family has which).

Matmuls run in the dtype of their input (`kernels.matmul`); norms, softmax and logits are float32. Of sharding a module
knows one thing: it tells `shard.constrain` what the dimensions of an activation mean.

Initial values: matrices are normal with variance 1 / fan_in, so that a normalised input gives outputs of variance 1. The
two matrices that add to the residual stream are scaled down by sqrt(2 * num_layers) more, the number of such additions
(Radford et al. 2019, section 2.3). Token and position tables have a standard deviation of 0.02. Gains are 1, offsets 0.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.config import ModelConfig
from jaxlm.models import dropout, rope
from jaxlm.models.dropout import Dropout
from jaxlm.models.padding import without_padding
from jaxlm.models.parameters import Normal, declare
from jaxlm.models.rematerialisation import name
from kernels.attention import UnsupportedError, attention
from kernels.matmul import add_bias, einsum
from kernels.placement import Placement
from partitioning.declaration import DeclarationError

ACTIVATIONS = {
    "swiglu": jax.nn.silu,                     # Shazeer 2020, arXiv:2002.05202
    "geglu": jax.nn.gelu,
    "gelu": jax.nn.gelu,                       # the tanh approximation, as GPT-2
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),      # So et al. 2021, arXiv:2109.08668
    "silu": jax.nn.silu,
}
TABLE = Normal(std=0.02)
NO_WINDOW = 2 ** 30                            # longer than any sequence: 'all' where windows differ from layer to layer
# The residual stream, and what a part of a block makes of it. They differ in the name of the length, so that the stream
# and all that is done per token (norms, dropout, additions) can be split along it where the parts cannot: sequence
# parallelism (Korthikanti et al. 2022, arXiv:2205.05198) is a rule for stream_length.
STREAM = ("batch", "stream_length", "embed")
WHOLE = ("batch", "length", "embed")


@dataclasses.dataclass(frozen=True)
class Shared:
    """What every block of one forward pass is given besides the residual stream.

    Attributes:
      shard: has `constrain(x, dims)`, and `mesh` and `activation(dims)` for kernels, which run on each device's block.
      rotation: cosine and sine of `rope.angles`, or None.
      segment_ids_BL: int32, ids below 1 are padding; or None.
      dropout: the step's masks.
      query_offset: tokens before these in the cache, int32 [B]; 0 without a cache.
      backend: of attention.
      interpret: whether kernels run interpreted.
      local_rotation: as `rotation`, for layers that have a window, where theirs is another.
    """
    shard: Any
    rotation: tuple[jax.Array, jax.Array] | None = None
    segment_ids_BL: jax.Array | None = None
    dropout: Dropout = Dropout()
    query_offset: Any = 0
    backend: str = "auto"
    interpret: bool = False
    local_rotation: tuple[jax.Array, jax.Array] | None = None

    def in_layer(self, window) -> "Shared":
        """What a layer with this window (None, an int, or a traced int32 in which NO_WINDOW stands for None) is given."""
        if self.local_rotation is None or window is None:
            return self
        if isinstance(window, int):
            return dataclasses.replace(self, rotation=self.local_rotation)
        both = zip(self.local_rotation, self.rotation)
        return dataclasses.replace(self, rotation=tuple(jnp.where(window < NO_WINDOW, own, other) for own, other in both))


class Linear(nnx.Module):
    """A matrix between named dims, written as an einsum, and perhaps a bias."""

    def __init__(self, pattern: str, shape, dims, *, inputs: int, bias: bool, scale: float = 1.0):
        """`inputs`: how many leading dims of the kernel are summed over; `scale`: factor on the initial values."""
        fan_in = 1
        for size in shape[:inputs]:
            fan_in *= size
        self.pattern = pattern
        self.kernel = declare(shape, dims, Normal(std=scale * fan_in ** -0.5))
        self.bias = declare(shape[inputs:], dims[inputs:], Normal()) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = einsum(self.pattern, x, self.kernel[...])
        return y if self.bias is None else add_bias(y, self.bias[...])


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm over the last dims, in float32."""

    def __init__(self, config: ModelConfig, shape, dims, *, kind: str | None = None):
        """`shape`: of the dims that it normalises over, `dims`: their names; `kind`: instead of the configured one."""
        self.shape = tuple(shape)
        self.centred = (kind or config.norm) == "layernorm"
        self.epsilon = config.norm_epsilon
        self.offset = 1.0 if config.norm_unit_offset else 0.0      # of the gains from what is stored
        self.scale = declare(shape, dims, Normal(mean=1.0 - self.offset))
        self.bias = declare(shape, dims, Normal()) if config.bias and self.centred else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        axes = tuple(range(x.ndim - len(self.shape), x.ndim))
        for axis, size in zip(axes, self.shape):                   # padded heads would count in the means
            y = without_padding(y, axis, size)
        count = math.prod(self.shape)
        if self.centred:
            y = y - jnp.sum(y, axes, keepdims=True) / count
        y = y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axes, keepdims=True) / count + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        y = y * (scale + self.offset if self.offset else scale)
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    """A table with one row per token or position."""

    def __init__(self, rows: int, config: ModelConfig, dim: str | None):
        self.rows = rows
        self.embedding = declare((rows, config.embed_dim), (dim, "embed"), TABLE)

    def __call__(self, ids_BL: jax.Array) -> jax.Array:
        """Rows [B, L, D]; an id outside the table gives NaN, never another row nor one of padding."""
        table_VD = self.embedding[...]
        if table_VD.shape[0] != self.rows:
            ids_BL = jnp.where(ids_BL < self.rows, ids_BL, table_VD.shape[0])
        return jnp.take(table_VD, ids_BL, axis=0, mode="fill")

    def first(self, length: int) -> jax.Array:
        """The first `length` rows."""
        return self.embedding[...][:length]

    @property
    def matrix(self) -> jax.Array:
        """What `logits` multiplies with, [V, D]."""
        return self.embedding[...]

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Tied output: float32 products with every row."""
        return einsum("bld,vd->blv", x_BLD, self.embedding[...], jnp.float32)


class Head(nnx.Module):
    """The output matrix."""

    def __init__(self, config: ModelConfig):
        shape = (config.embed_dim, config.vocab_size)
        self.kernel = declare(shape, ("embed", "vocab"), Normal(std=config.embed_dim ** -0.5))

    @property
    def matrix(self) -> jax.Array:
        """What `logits` multiplies with, [D, V]."""
        return self.kernel[...]

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Float32 [B, L, V]."""
        return einsum("bld,dv->blv", x_BLD, self.kernel[...], jnp.float32)


class Attention(nnx.Module):
    """Causal self-attention with grouped key and value heads (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig):
        D, H, G, K = config.embed_dim, config.num_heads, config.kv_heads, config.head_width
        self.num_heads = H
        self.softcap, self.scale = config.attention_softcap, config.attention_scale
        bias = config.has_bias("qkv")
        self.query = Linear("bld,dhk->blhk", (D, H, K), ("embed", "heads", "head_dim"), inputs=1, bias=bias)
        self.key = Linear("bld,dgk->blgk", (D, G, K), ("embed", "kv_heads", "head_dim"), inputs=1, bias=bias)
        self.value = Linear("bld,dgk->blgk", (D, G, K), ("embed", "kv_heads", "head_dim"), inputs=1, bias=bias)
        self.output = Linear("blhk,hkd->bld", (H, K, D), ("heads", "head_dim", "embed"), inputs=2,
                             bias=config.has_bias("output"), scale=(2 * config.num_layers) ** -0.5)
        if config.qk_norm:                     # per head: Dehghani et al. 2023, arXiv:2302.05442
            together = config.qk_norm_over == "all"
            self.query_norm, self.key_norm = (
                Norm(config, (heads, K), (dim, "head_dim"), kind="rmsnorm") if together else
                Norm(config, (K,), ("head_dim",), kind="rmsnorm") for heads, dim in ((H, "heads"), (G, "kv_heads")))
        self.qk_norm = config.qk_norm

    def __call__(self, x_BLD: jax.Array, shared: Shared, window, cache=None) -> tuple[jax.Array, Any]:
        """The heads' output [B, L, D] and the cache with this call's keys and values (None without one)."""
        heads, kv_heads = ("batch", "length", "heads", "head_dim"), ("batch", "length", "kv_heads", "head_dim")
        constrain = shared.shard.constrain
        q_BLHK, k_BLGK = constrain(self.query(x_BLD), heads), constrain(self.key(x_BLD), kv_heads)
        v_BLGK = name(constrain(self.value(x_BLD), kv_heads), "value")
        if self.qk_norm:
            q_BLHK, k_BLGK = self.query_norm(q_BLHK), self.key_norm(k_BLGK)
        if shared.rotation is not None:
            q_BLHK, k_BLGK = rope.rotate(q_BLHK, shared.rotation), rope.rotate(k_BLGK, shared.rotation)
        q_BLHK, k_BLGK = name(q_BLHK, "query"), name(k_BLGK, "key")
        if cache is not None:
            cache = {"key": constrain(_write(cache["key"], k_BLGK, shared.query_offset), kv_heads),
                     "value": constrain(_write(cache["value"], v_BLGK, shared.query_offset), kv_heads)}
            k_BLGK, v_BLGK = cache["key"], cache["value"]
        try:
            out_BLHK = attention(q_BLHK, k_BLGK, v_BLGK, causal=True, window=window, query_offset=shared.query_offset,
                                 q_segment_ids_BT=shared.segment_ids_BL, k_segment_ids_BS=shared.segment_ids_BL,
                                 softcap=self.softcap, scale=self.scale, backend=shared.backend, interpret=shared.interpret,
                                 placement=Placement(shared.shard.mesh, *map(shared.shard.activation, (heads, kv_heads))))
        except UnsupportedError as error:
            raise DeclarationError(f"config.kernels.attention: {error}") from None
        out_BLHK = without_padding(constrain(out_BLHK, heads), 2, self.num_heads)
        return name(self.output(name(out_BLHK, "attention")), "attention_out"), cache


def _write(cache_BSGK: jax.Array, new_BTGK: jax.Array, offset_B: jax.Array) -> jax.Array:
    """The cache with `new` from each row's offset on; what would fall off the end is dropped."""
    row_B1 = jnp.arange(new_BTGK.shape[0])[:, None]
    place_BT = offset_B[:, None] + jnp.arange(new_BTGK.shape[1])
    return cache_BSGK.at[row_B1, place_BT].set(new_BTGK, mode="drop")


class MLP(nnx.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        D, F, bias = config.embed_dim, config.mlp_dim, config.has_bias("mlp")
        self.mlp_dim = F
        self.activation = config.activation
        self.gate = Linear("bld,df->blf", (D, F), ("embed", "mlp"), inputs=1, bias=bias) if config.gated else None
        self.up = Linear("bld,df->blf", (D, F), ("embed", "mlp"), inputs=1, bias=bias)
        self.down = Linear("blf,fd->bld", (F, D), ("mlp", "embed"), inputs=1, bias=bias, scale=(2 * config.num_layers) ** -0.5)

    def __call__(self, x_BLD: jax.Array, shared: Shared) -> jax.Array:
        def wide(linear, point):
            return name(shared.shard.constrain(linear(x_BLD), ("batch", "length", "mlp")), point)

        act = ACTIVATIONS[self.activation]
        hidden_BLF = act(wide(self.up, "mlp_up")) if self.gate is None else (
            act(wide(self.gate, "mlp_gate")) * wide(self.up, "mlp_up"))
        hidden_BLF = without_padding(hidden_BLF, 2, self.mlp_dim)
        return name(self.down(name(hidden_BLF, "mlp_hidden")), "mlp_out")


def enter(x_BLD: jax.Array, shard: Any) -> jax.Array:
    """What a part of a block reads of the stream, with its length whole. Both places are named, so that where they differ this
    array moves, rounded as it is: the compiler would be free to move an earlier one, in float32."""
    return shard.constrain(shard.constrain(x_BLD, STREAM), WHOLE)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or with the norm after each part, or with both."""

    def __init__(self, config: ModelConfig):
        before, after = config.norm_placement != "after", config.norm_placement != "before"

        def norm(there):
            return Norm(config, (config.embed_dim,), ("embed",)) if there else None

        self.attention_norm, self.attention_out_norm = norm(before), norm(after)
        self.attention = Attention(config)
        self.mlp_norm, self.mlp_out_norm = norm(before), norm(after)
        self.mlp = MLP(config)

    def __call__(self, x_BLD: jax.Array, shared: Shared, layer, window, cache=None) -> tuple[jax.Array, Any]:
        """The residual stream after this block, and its cache. `layer` and `window` may be traced (they are scanned along)."""
        def into(norm, x_BLD):
            return enter(x_BLD if norm is None else norm(x_BLD), shared.shard)

        def out(norm, y_BLD, site):
            y_BLD = shared.shard.constrain(y_BLD, STREAM)
            return shared.dropout(y_BLD if norm is None else norm(y_BLD), layer, site)

        y_BLD, cache = self.attention(into(self.attention_norm, x_BLD), shared, window, cache)
        x_BLD = x_BLD + out(self.attention_out_norm, y_BLD, dropout.ATTENTION)
        y_BLD = self.mlp(into(self.mlp_norm, x_BLD), shared)
        return x_BLD + out(self.mlp_out_norm, y_BLD, dropout.MLP), cache


class Transformer(nnx.Module):
    """The parts of the whole; `layers` is one block, which stands for all."""

    def __init__(self, config: ModelConfig):
        self.embed = Embedding(config.vocab_size, config, "vocab")
        if config.position == "learned":
            self.positions = Embedding(config.max_positions, config, None)
        self.layers = Block(config)
        self.final_norm = Norm(config, (config.embed_dim,), ("embed",))
        if not config.tie_embeddings:
            self.lm_head = Head(config)
