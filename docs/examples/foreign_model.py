"""A Flax NNX model that knows nothing of sharding, trained with ZeRO 3 on eight simulated devices, and on one.

    PYTHONPATH=. python docs/examples/foreign_model.py

The model is a small MLP-Mixer as its users write it. What sharding needs is beside it: a table of dims, and a declaration.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import re

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from partitioning import ArraySpec, MeshConfig, ShardingConfig, make_mesh, resolve, resolve_sizes, text

PATCHES, PIXELS, CHANNELS, CLASSES = 16, 24, 64, 8


class Block(nnx.Module):
    """Mixes the tokens, then the channels, of x [B, tokens, channels]."""

    def __init__(self, rngs: nnx.Rngs):
        self.token_norm = nnx.LayerNorm(CHANNELS, rngs=rngs)
        self.token_mix = nnx.Linear(PATCHES, PATCHES, rngs=rngs)
        self.channel_norm = nnx.LayerNorm(CHANNELS, rngs=rngs)
        self.up = nnx.Linear(CHANNELS, 4 * CHANNELS, rngs=rngs)
        self.down = nnx.Linear(4 * CHANNELS, CHANNELS, rngs=rngs)

    def __call__(self, x):
        x = x + self.token_mix(self.token_norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.down(nnx.gelu(self.up(self.channel_norm(x))))


class Mixer(nnx.Module):
    """Images as patches [B, tokens, pixels] to scores [B, classes]."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Linear(PIXELS, CHANNELS, rngs=rngs)
        self.first = Block(rngs)
        self.second = Block(rngs)
        self.head = nnx.Linear(CHANNELS, CLASSES, rngs=rngs)

    def __call__(self, x, constrain=lambda x, dims: x):
        x = constrain(self.stem(x), ("batch", "tokens", "channels"))
        x = constrain(self.first(x), ("batch", "tokens", "channels"))
        x = constrain(self.second(x), ("batch", "tokens", "channels"))
        return self.head(x.mean(axis=1))


# The dims of each parameter: the first expression that matches its whole path.
DIMS = (
    (r"stem/kernel", ("pixels", "channels")),
    (r"head/kernel", ("channels", "classes")),
    (r".*/token_mix/kernel", ("tokens", "tokens_out")),
    (r".*/up/kernel", ("channels", "hidden")),
    (r".*/down/kernel", ("hidden", "channels")),
    (r".*/up/bias", ("hidden",)),
    (r".*/token_mix/bias", ("tokens",)),
    (r"head/bias", ("classes",)),
    (r".*(bias|scale)", ("channels",)),
)
RULES = dict(hidden="tensor", channels=None, pixels=None, tokens=None, tokens_out=None, classes=None)


def describe(path, x) -> ArraySpec:
    """A parameter's shape and dtype, and its dims from the table."""
    name = "/".join(str(key.key) for key in path)
    matching = [dims for pattern, dims in DIMS if re.fullmatch(pattern, name)]
    if not matching:
        raise ValueError(f"DIMS says nothing of {name}, which has shape {x.shape}.")
    return ArraySpec(x.shape, x.dtype, matching[0])


def train(devices, mesh: MeshConfig, steps: int = 3):
    """Trains on these devices. Returns (layout, losses, parameters, optimizer state)."""
    optimizer = optax.adamw(1e-3)
    graph, template = nnx.split(nnx.eval_shape(lambda: Mixer(nnx.Rngs(0))), nnx.Param)

    def initial():
        params = nnx.to_pure_dict(nnx.state(Mixer(nnx.Rngs(0)), nnx.Param))
        return params, optimizer.init(params)

    abstract, abstract_state = jax.eval_shape(initial)
    specs = jax.tree_util.tree_map_with_path(describe, abstract)
    sizes = resolve_sizes(mesh, len(devices))
    layout = resolve(sizes, ShardingConfig(zero=3, rules=RULES), specs, optimizer={"mu": specs, "nu": specs})
    layout = layout.on(make_mesh(sizes, devices))

    # Moments lie by the optimizer table (mu's and nu's specs are equal); counters are on every device.
    moments = optax.tree_map_params(optimizer, lambda _, spec: layout.sharding(spec), abstract_state, layout.optimizer["mu"],
                                    transform_non_params=lambda _: layout.sharding(PartitionSpec()))
    weights = jax.tree.map(layout.sharding, layout.params, is_leaf=lambda x: isinstance(x, PartitionSpec))
    params, state = jax.jit(initial, out_shardings=(weights, moments))()

    def loss(params, images, labels):
        used = layout.use(params, "", "float32")
        variables = jax.tree.map(lambda x: x, template)
        nnx.replace_by_pure_dict(variables, used)
        scores = nnx.merge(graph, variables)(layout.constrain(images, ("batch", "tokens", "pixels")), layout.constrain)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    def step(params, state, images, labels):
        value, gradients = jax.value_and_grad(loss)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step, out_shardings=(weights, moments, None), donate_argnums=(0, 1))
    images = jax.random.normal(jax.random.key(1), (32, PATCHES, PIXELS))
    labels = jnp.arange(32) % CLASSES
    images, labels = jax.device_get((images, labels))  # so that the mesh decides where they go
    losses = []
    for _ in range(steps):
        params, state, value = step(params, state, images, labels)
        losses.append(float(value))
    return layout, losses, params, state


if __name__ == "__main__":
    layout, losses, params, _ = train(jax.devices(), MeshConfig(data=1, fsdp=-1, tensor=2))
    print(text(layout))
    print("eight devices:", losses)
    print("one device:   ", train(jax.devices()[:1], MeshConfig())[1])
