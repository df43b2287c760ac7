"""The example in docs/sharding.md, for people whose model is not ours, runs as it stands."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "sharding.md"


def test_the_python_example_shards_a_model_of_someone_else(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    names = {}
    exec(program, names)
    assert "mlp/up/kernel" in capsys.readouterr().out
    layout = names["layout"]
    assert layout.params["mlp"]["up"]["kernel"] == P(None, "fsdp")
    params = {"mlp": {name: {"kernel": jnp.full(shape, 0.01)} for name, shape in (("up", (512, 2048)), ("down", (2048, 512)))}}
    y = jax.jit(names["apply"])(params, jnp.ones((8, 512), jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(y, np.float32), 0.01 * 2048 * jax.nn.gelu(5.12), rtol=2e-2)
    assert y.sharding.is_equivalent_to(layout.sharding(P("fsdp", None)), 2)
