"""The loop: a request to stop is never lost between the question and the answer."""

import itertools
import time

import jax
import numpy as np
import pytest

from jaxlm import faults, loop as module
from jaxlm.errors import RollBack, RunError, Stopped
from jaxlm.job import build_job
from jaxlm.loop import run_loop
from jaxlm.train import out_of_memory_explained
from tests.system.curves import config_of


class Stop:
    """A flag that is raised between two looks at it, as a signal can be."""

    def __init__(self, looks):
        self.looks = looks

    def reached(self, step):
        self.looks -= 1
        return "SIGTERM" if self.looks < 0 else None


class Recorder:
    def __init__(self):
        self.rows = []

    def row(self, row):
        self.rows.append(row)

    def line(self, line):
        self.rows.append({"line": line})


class Checkpoints:
    def __init__(self, on_save):
        self.saved, self.on_save = [], on_save

    def save(self, step, state, about):
        self.on_save()
        self.saved.append(step)
        self.about = about

    def steps(self):
        return self.saved

    def wait(self):
        pass


class Feed:
    wait_seconds = 0.0

    def __next__(self):
        return {}


class Profile:
    def before(self, step):
        pass

    def after(self, step, wait):
        return False


def loop(stop, *, bad_step=-1, stop_at=20, evaluate=None, check_replicas=None, on_save=lambda rows: None, **leaves):
    class Job:
        config = config_of(**leaves)
        to_saved = staticmethod(lambda state: state)

    metrics = dict(loss=np.float32(1), grad_norm=np.float32(1), learning_rate=np.float32(1), skipped=np.int32(0))
    metrics |= {name: np.asarray(value) for name, value in faults.initial_counters().items()}
    count = itertools.count(1)

    def train_step(state, batch):
        step = next(count)
        return {"params": {}, "optimizer": {}}, {**metrics, "bad_step": np.int32(bad_step if 0 < bad_step <= step else -1)}

    recorder = Recorder()
    checkpoints = Checkpoints(lambda: on_save(recorder.rows))
    error = None
    try:
        run_loop(
            Job(),
            train_step,
            {"params": {}},
            Feed(),
            start=0,
            stop_at=stop_at,
            recorder=recorder,
            checkpoints=checkpoints,
            about=lambda step: {},
            evaluate=evaluate,
            sample=None,
            check_replicas=check_replicas,
            profile=Profile(),
            stop=stop,
        )
    except Exception as raised:  # noqa: BLE001 - what it raised is the result
        error = raised
    return error, recorder.rows, checkpoints.saved


@pytest.mark.parametrize("looks", range(8))
def test_a_run_that_stops_has_saved_the_step_that_it_names(looks):
    error, _, saved = loop(Stop(looks))
    assert isinstance(error, Stopped) and f"after step {saved[-1]}" in str(error)


def test_rows_are_written_at_the_first_step_at_logged_steps_and_at_the_last():
    _, rows, saved = loop(Stop(10**6), stop_at=23)
    assert [row["step"] for row in rows] == [1, 10, 20, 23] and saved == [23]


def test_bad_numbers_stop_the_run_before_anything_is_saved():
    error, _, saved = loop(Stop(10**6), bad_step=1)
    assert "not finite at step 1" in str(error) and "none" in str(error) and saved == []


def test_bad_numbers_between_logged_rows_are_seen_before_a_save():
    error, rows, saved = loop(Stop(10**6), bad_step=2, checkpoint__every=4)
    assert "not finite at step 2" in str(error) and saved == [] and [row["step"] for row in rows] == [1]


def test_a_bad_step_that_is_declared_to_send_the_run_back_does_and_saves_nothing():
    error, _, saved = loop(Stop(10**6), bad_step=12, checkpoint__every=5, faults__on_nonfinite="rollback")
    assert isinstance(error, RollBack) and error.facts.step == 12 and saved == [5, 10]


def test_replicas_are_compared_when_it_is_time_and_before_a_save():
    calls = []
    loop(Stop(10**6), stop_at=9, check_replicas=calls.append, faults__replica_check_every=4)
    assert calls == [{"params": {}, "optimizer": {}}] * 2

    def differ(tree):
        raise RunError("copies differ")

    error, _, saved = loop(Stop(10**6), check_replicas=differ, faults__replica_check_every=4, checkpoint__every=4)
    assert str(error) == "copies differ" and saved == []


def test_the_time_of_a_step_includes_waiting_for_its_numbers(monkeypatch):
    """A device that takes its time: dispatching is instant, reading is not."""
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: (time.sleep(0.05), get(x))[1])
    _, rows, _ = loop(Stop(10**6), stop_at=2, train__log_every=1)
    assert all(row["step_seconds"] >= 0.05 for row in rows)


def test_mfu_is_of_all_devices(monkeypatch):
    monkeypatch.setattr(module, "peak_flops", lambda kind, dtype: 1e9)
    _, rows, _ = loop(Stop(10**6), stop_at=1)
    per_token = module.model_flops_per_token(config_of().model, 32)
    assert rows[0]["mfu"] == pytest.approx(rows[0]["tokens_per_second"] * per_token / (1e9 * jax.device_count()))


def test_a_step_is_evaluated_before_it_is_saved():
    """A run that is killed right after its last save is finished; its evaluation must be on record by then."""
    at_save = []
    loop(
        Stop(10**6),
        stop_at=50,
        evaluate=lambda params: {"eval_loss": 1.0},
        on_save=lambda rows: at_save.append("eval_loss" in rows[-1]),
    )
    assert at_save == [True]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("numpy"),
        jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 1 bytes"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 bytes"),
    ],
)
def test_running_out_of_memory_names_the_largest_arrays_and_what_to_change(error):
    job = build_job(config_of(mesh__data=1), 1)
    with (
        pytest.raises(RunError, match=r"out of memory(.|\n)*activations/logits(.|\n)*gradient_accumulation"),
        out_of_memory_explained(job),
    ):
        raise error
    with pytest.raises(jax.errors.JaxRuntimeError, match="another"), out_of_memory_explained(job):
        raise jax.errors.JaxRuntimeError("INTERNAL: another")


def test_a_checkpoint_is_saved_when_so_many_minutes_have_gone_by(monkeypatch):
    now = itertools.count(0, 20)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))            # 20 s from a look to the next
    _, _, saved = loop(Stop(10**6), checkpoint__every_minutes=1.0)
    assert saved == [3, 6, 9, 12, 15, 18, 20]
    assert loop(Stop(10**6), checkpoint__every_minutes=0.0)[2] == [20]


@pytest.mark.parametrize("reaction", ["stop", "continue"])
def test_a_save_that_fails_stops_the_run_or_is_told_and_left(reaction):
    fails = iter([True, False, False, False, False])

    def on_save(rows):
        if next(fails):
            raise RunError("the checkpoint of step 5 could not be written")

    error, rows, saved = loop(Stop(10**6), on_save=on_save, checkpoint__every=5, checkpoint__on_save_error=reaction)
    lines = [row["line"] for row in rows if "line" in row]
    if reaction == "stop":
        assert isinstance(error, RunError) and saved == [] and lines == []
    else:
        assert error is None and saved == [10, 15, 20]
        (line,) = lines
        assert line.startswith("WARNING: the checkpoint of step 5 could not be written Going on without it")
