"""The profiler's window: declared steps and no others, and a trace that tools can open."""

import jax
import jax.numpy as jnp
import pytest

from jaxlm.logs import ProfileWindow


@pytest.fixture
def calls(monkeypatch):
    out = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: out.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: out.append("stop"))
    return out


def run(window, calls, steps):
    for step in steps:
        window.before(step)
        calls.append(step)
        window.after(step, lambda: calls.append("wait"))
    window.close()


def test_exactly_the_declared_steps_are_traced_and_the_last_is_waited_for(calls):
    run(ProfileWindow.declared((2, 3), "trace"), calls, range(1, 6))
    assert calls == [1, ("start", "trace"), 2, 3, "wait", "stop", 4, 5]


def test_nothing_declared_traces_nothing(calls):
    run(ProfileWindow.declared((), "trace"), calls, range(3))
    assert calls == [0, 1, 2]


def test_a_run_that_resumes_or_ends_inside_the_window_traces_its_part(calls):
    run(ProfileWindow(2, 9, "trace"), calls, (5, 6))
    assert calls == [("start", "trace"), 5, 6, "stop"]


def test_a_trace_is_written_in_the_form_that_tensorboard_and_xprof_open(tmp_path):
    window = ProfileWindow(1, 1, tmp_path / "profile")
    window.before(1)
    x = jax.jit(lambda x: x @ x)(jnp.ones((8, 8)))
    assert window.after(1, lambda: jax.block_until_ready(x))
    trace, = tmp_path.rglob("*.xplane.pb")
    assert trace.stat().st_size > 0 and trace.relative_to(tmp_path).parts[:3] == ("profile", "plugins", "profile")
