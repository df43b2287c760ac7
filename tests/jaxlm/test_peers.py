"""Processes that end and stop together, played by threads, with steps that wait for each other as on devices."""

import json
import os
import random
import subprocess
import sys
import threading
import time

import pytest

from jaxlm import peers as module
from jaxlm.checkpoints import Checkpoints
from jaxlm.config import CheckpointConfig
from jaxlm.errors import RunError
from jaxlm.peers import Peers
from jaxlm.signals import StopFlag

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class Store:
    """What JAX's coordination service keeps, for all that share it."""

    def __init__(self):
        self.words, self.lock = {}, threading.Lock()

    def key_value_set(self, key, value):
        with self.lock:
            if key in self.words:
                raise RuntimeError("ALREADY_EXISTS")
            self.words[key] = value

    def key_value_dir_get(self, key):
        with self.lock:
            return [(k, v) for k, v in self.words.items() if k.startswith(key)]

    def blocking_key_value_get(self, key, milliseconds):
        if key not in self.words:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.words[key]


class Ended(Exception):
    pass


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL", 0.005)
    monkeypatch.setattr(module, "GRACE", 0.1)


@pytest.mark.parametrize("seed", range(12))
def test_a_signal_to_some_stops_all_after_the_same_step(seed, quick):
    """Step s ends when all have begun it, and two may be under way: as on devices. No process waits for one that went ahead."""
    rng = random.Random(seed)
    count, last, store = rng.choice([2, 3, 5]), 400, Store()
    begun = [threading.Barrier(count) for _ in range(last + 1)]
    stopped, failures = {}, []
    signalled = {i: rng.randrange(1, 60) for i in rng.sample(range(count), rng.choice([1, 1, count]))}
    pauses = [rng.choice([0, 0.001, 0.004]) for _ in range(count)]

    def process(index):
        waiting = []

        def collective(step):
            thread = threading.Thread(target=lambda: begun[step].wait(20))
            thread.start()
            waiting.append(thread)

        try:
            peers = Peers(store, index, count)
            with peers, StopFlag(peers) as stop:
                for step in range(1, last + 1):
                    time.sleep(pauses[index])
                    collective(step)
                    if len(waiting) > 2:
                        waiting.pop(0).join(20)
                    if signalled.get(index) == step:
                        stop.reason = "SIGTERM"
                    reason = stop.reached(step)
                    if reason or step == last:
                        stopped[index] = step, reason
                        break
                for thread in waiting:
                    thread.join(20)
        except Exception as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    # Handlers of signals belong to the main thread; these processes are threads.
    StopFlag.__enter__, enter = lambda self: (setattr(self._peers, "listener", self.hear), self)[1], StopFlag.__enter__
    try:
        threads = [threading.Thread(target=process, args=(i,), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        StopFlag.__enter__ = enter
    assert not failures and len(stopped) == count and not any(barrier.broken for barrier in begun), (failures, stopped)
    assert len(set(stopped.values())) == 1
    step, reason = next(iter(stopped.values()))
    assert step >= min(signalled.values()) and (reason is None) == (step == last)
    if reason:
        assert reason in {f"SIGTERM to process {i}" for i in signalled}


def test_a_process_that_has_finished_keeps_nobody_waiting(quick):
    store = Store()
    first, second = Peers(store, 0, 2), Peers(store, 1, 2)
    with StopFlag(first, start=7):
        pass                                   # it is done, and says where it ended
    with second, StopFlag(second, start=7) as stop:
        stop.reason = "SIGTERM"
        assert next(step for step in range(8, 10**6) if stop.reached(step) or time.sleep(0.001)) >= 8


def test_a_process_alone_is_asked_directly():
    with StopFlag() as stop:
        assert stop.reached(1) is None
        stop.reason = "SIGINT"
        assert stop.reached(2) == "SIGINT"


def test_what_processes_see_is_compared():
    store = Store()

    def see(index, found, name="starting point"):
        Peers(store, index, 2).agree(name, found, 1)

    see(0, "step 4")
    see(1, "step 4")
    with pytest.raises(RunError, match="process 1 has another starting point than process 0: step 2, not step 4"):
        see(1, "step 2")
    with pytest.raises(RunError, match="did not say within 1 s which mesh"):
        see(1, "data 2", "mesh")


ONE = """
import sys, time
from jaxlm import peers
from jaxlm.errors import RunError
from partitioning.declaration import DeclarationError
from tests.jaxlm.test_peers import Store
peers.POLL, peers.GRACE = 0.02, 0.2
store = Store()
"""


def end_of(code, **words):
    """Exit status and stderr of a program around a process's `Peers`, and the words that are in the store beforehand."""
    lines = ONE + "".join(f"store.key_value_set({key!r}, {value!r})\n" for key, value in words.items()) + code
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("error, status", [
    ("DeclarationError('bad mesh')", 2), ("RunError('no room')", 1), ("KeyboardInterrupt()", 3), ("KeyError('x')", 1)])
def test_a_process_that_ends_tells_why_and_does_not_wait(error, status):
    code = f"""
import atexit, threading
atexit.register(lambda: time.sleep(1000))      # as JAX's shutdown does without the others
import os
leave = os._exit
os._exit = lambda status: (print(store.words["jaxlm/end"], file=sys.stderr, flush=True), leave(status))
with peers.Peers(store, 1, 2):
    raise {error}
"""
    found, text = end_of(code)
    assert found == status
    end = json.loads(text.splitlines()[-1])
    assert end["process"] == 1 and end["status"] == status and end["words"].split(":")[-1].strip() in text
    assert ("Traceback" in text) == ("KeyError" in error)


def test_a_process_that_is_busy_ends_with_the_status_and_reason_of_another():
    end = json.dumps({"process": 3, "status": 2, "words": "error: bad mesh"})
    status, text = end_of("with peers.Peers(store, 1, 4): time.sleep(1000)", **{"jaxlm/end": end})
    assert status == 2 and text == "process 1 stops because process 3 has ended: error: bad mesh\n"


@pytest.mark.parametrize("kind", ["jax.errors.JaxRuntimeError", "ValueError"])
def test_a_collective_that_fails_ends_a_process_at_once_with_the_likely_reason(kind):
    code = f"""
import jax
with peers.Peers(store, 1, 2) as us:
    try:
        with us.ending_is_told():
            raise {kind}("UNKNOWN: Gloo all-reduce failed: Connection reset by peer\\nmore")
    finally:
        time.sleep(1000)                       # tidying up that needs the other
"""
    status, text = end_of(code)
    assert status == 1 and "process 1 lost the connection to another process, which has probably died: UNKNOWN: Gloo" in text
    assert "Traceback" not in text and "more" not in text
    end = json.dumps({"process": 0, "status": 3, "words": "interrupted"})
    assert end_of(code, **{"jaxlm/end": end}) == (3, "process 1 stops because process 0 has ended: interrupted\n")


@pytest.mark.parametrize("count", [1, 2])
def test_a_peer_that_is_lost_while_a_checkpoint_is_read_is_not_damage(count, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    monkeypatch.setattr("jax.process_count", lambda: count)
    with pytest.raises(Exception, match="Gloo") as found, checkpoints._reading(30):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    assert isinstance(found.value, RunError) == (count == 1)
