"""Starting from a part of another run's checkpoint, by declaration: what is read is counted, and nothing else is missing."""

import jax
import numpy as np
import pytest

from jaxlm import starting_point
from jaxlm.commandline import load_config
from jaxlm.job import build_job
from partitioning.declaration import DeclarationError
from partitioning.paths import flatten
from tests.system.commands import TINY, run
from tests.system.test_resume import arrays


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "run"
    run("train", f"--config={TINY}", f"--workdir={folder}", "--config.train.steps=5", "--config.optimizer.warmup_steps=0")
    return folder


def started(source, tmp_path, *overrides):
    """(the state, the opening line, the job) of a run that starts from `source`."""
    config = load_config(str(TINY), [("checkpoint.restore_from", str(source)), ("mesh.data", "1"), *overrides])
    job = build_job(config, 1).on_devices(jax.devices()[:1])
    point = starting_point.find(config, tmp_path)
    words = starting_point.check(point, job, None, allow_change=False)
    return flatten(jax.device_get(starting_point.load(point, job))), words, job


def saved(source):
    return {name.replace("']['", "/").strip("[']"): x for name, x in arrays(source, 5).items()}


def test_parameters_that_are_not_included_start_at_random(source, tmp_path):
    state, words, job = started(source, tmp_path, ("checkpoint.include", "layers/attention/.*,embedding"))
    there, random = saved(source), flatten(jax.device_get(job.initialise()))
    read = {path for path in there if path.startswith("params/layers/attention/") or path == "params/embed/embedding"}
    assert len(read) == 5 and f"({len(read)} arrays: parameters alone)" in words
    others = [path.removeprefix("params/") for path in random if path.startswith("params/") and path not in read]
    assert words.endswith(f"; at random, seed 0: {', '.join(others)}")
    for path, x in state.items():
        np.testing.assert_array_equal(x, (there if path in read else random)[path], err_msg=path)


def test_a_smaller_vocabulary_is_left_out_by_including_the_rest(source, tmp_path):
    with pytest.raises(DeclarationError, match=r"params/embed/embedding: shape \(264, 32\) there, \(300, 32\) here"):
        started(source, tmp_path, ("model.vocab_size", "300"))
    state, _, _ = started(source, tmp_path, ("model.vocab_size", "300"), ("checkpoint.include", "layers/.*,final_norm/.*"))
    assert state["params/embed/embedding"].shape == (300, 32)
    np.testing.assert_array_equal(state["params/layers/mlp/up/kernel"], saved(source)["params/layers/mlp/up/kernel"])


def test_arrays_that_are_called_otherwise_there_are_renamed(source, tmp_path):
    swap = "(('^layers/mlp/gate/','layers/mlp/other/'),('^layers/mlp/up/','layers/mlp/gate/'),('/other/','/up/'))"
    state, words, _ = started(source, tmp_path, ("checkpoint.rename", swap))
    there = saved(source)
    np.testing.assert_array_equal(state["params/layers/mlp/gate/kernel"], there["params/layers/mlp/up/kernel"])
    np.testing.assert_array_equal(state["params/layers/mlp/up/kernel"], there["params/layers/mlp/gate/kernel"])
    assert f"({sum(path.startswith('params/') for path in there)} arrays: parameters alone)" in words


def test_a_whole_state_is_renamed_with_its_optimizer_state(source, tmp_path):
    swap = "(('/gate/','/other/'),('/up/','/gate/'),('/other/','/up/'))"
    config = [("checkpoint.rename", swap), ("checkpoint.restore", "all"), ("train.steps", "9")]
    config = load_config(str(TINY), [("checkpoint.restore_from", str(source)), ("mesh.data", "1"), *config])
    job = build_job(config, 1).on_devices(jax.devices()[:1])
    state = flatten(jax.device_get(starting_point.load(starting_point.find(config, tmp_path), job)))
    there = saved(source)
    np.testing.assert_array_equal(state["optimizer/mu/layers/mlp/gate/kernel"], there["optimizer/mu/layers/mlp/up/kernel"])
    assert state["counters/step"] == 5


@pytest.mark.parametrize("overrides, words", [
    ([("checkpoint.include", "lm_haed/.*")], "config.checkpoint.include: 'lm_haed/.*' matches no parameter; there are"),
    ([("checkpoint.rename", "(('blocks','layers'),)")], "config.checkpoint.rename: 'blocks' changes the name of no array"),
    ([("checkpoint.rename", "(('/up/','/gate/'),)")], "calls both params/layers/mlp/gate/kernel and params/layers/mlp/up/kernel"),
    ([("checkpoint.rename", "(('embed/embedding','embed/table'),)")], "params/embed/embedding: missing there"),
    ([("checkpoint.rename", "('up','gate')")], "config.checkpoint.rename[0] = 'up'; expected a pair"),
    ([("checkpoint.include", "(")], "'(' is no regular expression"),
    ([("checkpoint.include", "embed/.*"), ("checkpoint.restore", "all")], "set restore = 'params'"),
])
def test_mistakes_are_told(overrides, words, source, tmp_path):
    with pytest.raises(DeclarationError) as error:
        started(source, tmp_path, *overrides)
    assert words in str(error.value)


@pytest.mark.parametrize("there, here", [("float16", "float32"), ("float32", "float16")])
def test_a_run_goes_on_with_or_without_a_loss_scale(there, here, tmp_path):
    """The scale's counters are left out where nothing reads them, and start anew where nothing is there."""
    keys = (f"--config={TINY}", f"--workdir={tmp_path}", "--config.train.log_every=1")
    run("train", *keys, "--config.train.stop_at=2", f"--config.precision.compute={there}")
    config = load_config(str(TINY), [("mesh.data", "1"), ("precision.compute", here)])
    job = build_job(config, 1).on_devices(jax.devices()[:1])
    point = starting_point.find(config, tmp_path)
    assert "the whole state" in starting_point.check(point, job, None, allow_change=True)
    state = starting_point.load(point, job)
    assert int(state["counters"]["step"]) == 2 and ("loss_scale" in state["counters"]) == (here == "float16")
    assert {path for path in flatten(state)} == {path for path in flatten(job.abstract_state())}
