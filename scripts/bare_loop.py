"""A training loop in nothing but JAX and optax: the floor that `bench_step.py` holds the trainer against.

The mathematics is the trainer's at its benchmark size: RMSNorm, RoPE, grouped-query attention, SwiGLU, AdamW behind
global-norm clipping, one scan over the layers, donated buffers, matmul outputs saved (or no recomputation).
Prints one JSON object: seconds from the start of the process to the first loss, and of each step.
"""

import argparse
import functools
import json
import os
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--remat", choices=["none", "full", "dots"], default="dots")
parser.add_argument("--mesh", default="", help="data,fsdp,tensor on simulated devices, e.g. 2,2,2")
flags = parser.parse_args()
sizes = [int(n) for n in flags.mesh.split(",")] if flags.mesh else [1, 1, 1]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = str(sizes[0] * sizes[1] * sizes[2])

import jax  # noqa: E402 - the number of devices must be set first
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

DIM, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LENGTH, BATCH = 512, 8, 4, 64, 1408, 8192, 512, 8
mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

# name: (shape without the layer, fan-in, mesh axis of each dim)
LAYER = {
    "q": ((DIM, HEADS, HEAD_DIM), DIM, ("fsdp", "tensor", None)),
    "k": ((DIM, KV_HEADS, HEAD_DIM), DIM, ("fsdp", "tensor", None)),
    "v": ((DIM, KV_HEADS, HEAD_DIM), DIM, ("fsdp", "tensor", None)),
    "o": ((HEADS, HEAD_DIM, DIM), DIM, ("tensor", None, "fsdp")),
    "gate": ((DIM, MLP), DIM, ("fsdp", "tensor")),
    "up": ((DIM, MLP), DIM, ("fsdp", "tensor")),
    "down": ((MLP, DIM), MLP, ("tensor", "fsdp")),
    "norm1": ((DIM,), None, (None,)),
    "norm2": ((DIM,), None, (None,)),
}
OUTER = {
    "embed": ((VOCAB, DIM), DIM, ("tensor", "fsdp")),
    "head": ((DIM, VOCAB), DIM, ("fsdp", "tensor")),
    "norm": ((DIM,), None, (None,)),
}
FORMS = {**OUTER, **{f"layer.{n}": ((flags.layers, *shape), fan, (None, *axes)) for n, (shape, fan, axes) in LAYER.items()}}
SHARDINGS = {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, (_, _, axes) in FORMS.items()}
TOKENS = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))


def init(key):
    out = {}
    for i, (name, (shape, fan, _)) in enumerate(FORMS.items()):
        out[name] = jnp.ones(shape) if fan is None else jax.random.normal(jax.random.fold_in(key, i), shape) * fan**-0.5
    return out


def batch_split(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), *[None] * (x.ndim - 1))))


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def rotate(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(x, w):
    h = norm(x, w["norm1"])
    q, k, v = (jnp.einsum("bld,dhk->blhk", h, w[n]) for n in "qkv")
    mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = batch_split(x + jnp.einsum("blhk,hkd->bld", mixed, w["o"]))
    h = norm(x, w["norm2"])
    return batch_split(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])


POLICIES = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


def loss_of(params, tokens):
    layers = {name.removeprefix("layer."): w for name, w in params.items() if name.startswith("layer.")}
    x = batch_split(params["embed"][tokens[:, :-1]])
    x, _ = jax.lax.scan(lambda x, w: (POLICIES[flags.remat](block)(x, w), None), x, layers)
    logits = norm(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1))


def start(key):
    params = jax.lax.with_sharding_constraint(init(key), SHARDINGS)
    return params, optimizer.init(params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, tokens):
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def process_start():
    """When the kernel started this process, on the clock of time.time()."""
    ticks = float(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    return time.time() - float(open("/proc/uptime").read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")


replicated = NamedSharding(mesh, PartitionSpec())
shapes = jax.eval_shape(start, jax.random.key(0))
state_shardings = optax.tree_map_params(
    optimizer, lambda _, s: s, shapes[1], SHARDINGS, transform_non_params=lambda _: replicated
)
params, state = jax.jit(start, out_shardings=(SHARDINGS, state_shardings))(jax.random.key(0))
rng = np.random.default_rng(0)
seconds, first_loss_at = [], None
for _ in range(flags.steps):
    tokens = jax.device_put(rng.integers(0, VOCAB, (BATCH, LENGTH + 1), dtype=np.int32), TOKENS)
    began = time.perf_counter()
    params, state, loss = step(params, state, tokens)
    float(loss)
    seconds.append(time.perf_counter() - began)
    first_loss_at = first_loss_at or time.time() - process_start()
print(json.dumps({"first_loss_seconds": first_loss_at, "step_seconds": seconds}))
