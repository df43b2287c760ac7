"""The loop: a request to stop is never lost between the question and the answer."""

import numpy as np
import pytest

from jaxlm.errors import Stopped
from jaxlm.config import to_config
from jaxlm.loop import run_loop
from tests.system import tiny


class Stop:
    """A flag that is raised between two looks at it, as a signal can be."""

    def __init__(self, looks):
        self.looks = looks

    def agreed(self):
        self.looks -= 1
        return "SIGTERM" if self.looks < 0 else None


class Recorder:
    def __init__(self):
        self.rows = []

    def row(self, row):
        self.rows.append(row)


class Checkpoints:
    def __init__(self):
        self.saved = []

    def save(self, step, state, about):
        self.saved.append(step)

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


def loop(stop, *, bad_step=-1, stop_at=20):
    class Job:
        config = to_config(tiny.get_config())

    metrics = dict(
        loss=np.float32(1), grad_norm=np.float32(1), learning_rate=np.float32(1), skipped=np.int32(0), bad_step=np.int32(bad_step)
    )
    recorder, checkpoints = Recorder(), Checkpoints()
    error = None
    try:
        run_loop(
            Job(),
            lambda state, batch: ({"params": {}}, metrics),
            {"params": {}},
            Feed(),
            start=0,
            stop_at=stop_at,
            recorder=recorder,
            checkpoints=checkpoints,
            about=lambda step: {},
            evaluate=None,
            sample=None,
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
