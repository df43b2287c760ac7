"""The partitioner says on stderr, at compile time, when it has to replicate an activation to go on. It never has to."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from partitioning import ArraySpec, MeshConfig, ShardingConfig, make_mesh, resolve, resolve_sizes
axes = dict(pair.split("=") for pair in sys.argv[1].split(","))
specs = {"embed": {"embedding": ArraySpec((64, 48), "float32", ("vocab", "embed"))},
         "mlp": {"up": {"kernel": ArraySpec((48, 96), "float32", ("embed", "mlp"))},
                 "down": {"kernel": ArraySpec((96, 48), "float32", ("mlp", "embed"))}},
         "norm": {"scale": ArraySpec((48,), "float32", ("embed",))},
         "lm_head": {"kernel": ArraySpec((48, 64), "float32", ("embed", "vocab"))}}
layout = resolve(resolve_sizes(MeshConfig(**{a: int(n) for a, n in axes.items()}), 8), ShardingConfig(), specs)
layout = layout.on(make_mesh(layout.sizes))
def loss(params, tokens):
    use = lambda name: layout.use(params[name], name, "float32")
    x = layout.constrain(jnp.take(use("embed")["embedding"], tokens, axis=0), ("batch", "length", "embed"))
    mlp = use("mlp")
    hidden = layout.constrain(jax.nn.relu(x @ mlp["up"]["kernel"]), ("batch", "length", "mlp"))
    x = layout.constrain(x + hidden @ mlp["down"]["kernel"], ("batch", "length", "embed")) * use("norm")["scale"]
    return jnp.sum(layout.constrain(x @ use("lm_head")["kernel"], ("batch", "length", "vocab")) ** 2)
place = lambda spec, where: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=layout.sharding(where))
params = jax.tree.map(place, specs, layout.params, is_leaf=lambda x: isinstance(x, ArraySpec))
tokens = jax.ShapeDtypeStruct((8, 32), "int32", sharding=layout.sharding(layout.activation(("batch", "length"))))
jax.jit(jax.grad(loss)).lower(params, tokens).compile()
"""


@pytest.mark.parametrize("axes", ["fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2", "fsdp=8"])
def test_no_activation_is_replicated_involuntarily(axes):
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}       # a cached program has nothing to say
    done = subprocess.run([sys.executable, "-c", PROGRAM, axes], env=environment, cwd=pathlib.Path(__file__).parents[2],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr
