"""The programs in docs/examples run as they stand, and do what they say."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent

# A process of its own: the example asks for eight simulated devices before JAX starts.
PROGRAM = """
import json, runpy
example = runpy.run_path("docs/examples/foreign_model.py")
import jax
facts = {}
for name, devices, mesh in (("eight", jax.devices(), dict(data=1, fsdp=-1, tensor=2)), ("one", jax.devices()[:1], dict())):
    layout, losses, params, state = example["train"](devices, example["MeshConfig"](**mesh))
    arrays = {"params": params, "mu": state[0].mu, "nu": state[0].nu}
    facts[name] = dict(losses=losses,
                       shards={k: tree["first"]["up"]["kernel"].addressable_shards[0].data.shape for k, tree in arrays.items()},
                       devices=len(params["first"]["up"]["kernel"].sharding.device_set),
                       kernel=params["second"]["down"]["kernel"].tolist())
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts():
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_losses_of_a_foreign_model_on_eight_devices_are_those_of_one(facts):
    np.testing.assert_allclose(facts["eight"]["losses"], facts["one"]["losses"], rtol=1e-5)
    assert facts["one"]["losses"][0] > facts["one"]["losses"][-1]
    np.testing.assert_allclose(facts["eight"]["kernel"], facts["one"]["kernel"], atol=1e-5)


def test_the_parameters_and_moments_of_a_foreign_model_are_split(facts):
    assert (facts["eight"]["devices"], facts["one"]["devices"]) == (8, 1)
    assert set(map(tuple, facts["eight"]["shards"].values())) == {(16, 128)}
    assert set(map(tuple, facts["one"]["shards"].values())) == {(64, 256)}
