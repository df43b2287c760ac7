"""Several processes end together: when one ends before its time, it says why, and the others end too, soon and with its reason.

Without this a process that is left alone waits in its next collective, or at exit in JAX's shutdown, until a time-out of minutes.
What they say to each other goes through the key-value store of JAX's coordination service (in process 0), which works while the
devices wait for each other:

    jaxlm/end          {"process", "status", "words"}: who ends, with which exit status, and why. The first one stands.
    jaxlm/gone/ID      process ID has read it, and ends now (the coordinator stays until all do)
    jaxlm/stop/...     how to stop after the same step: `signals.py`
    jaxlm/same/NAME    what process 0 found, for the others to compare: `Peers.agree`

A process that dies without a word (kill -9, the machine is gone) is noticed by a collective that fails, where the connection
tells (gloo on CPUs), or else by JAX's heartbeat (`config.distributed.heartbeat_timeout`), which aborts the others.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from jaxlm.errors import RollBack, RunError, Stopped, last_words

PREFIX = "jaxlm/"
POLL = 0.5                                     # seconds between two looks at what the others say
GRACE = 2.0                                    # seconds in which a process may end in its own words after another has
# What the text of a failed collective has in it where the other end of a connection is gone.
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "socket closed", "broken pipe", "unavailable", "barrier")


def is_of_a_lost_peer(error: BaseException) -> bool:
    """Whether an error means that another process is gone. JAX raises JaxRuntimeError or ValueError, as it falls out."""
    return last_words(error) is None and any(word in str(error).lower() for word in _LOST)


class Peers:
    """The processes of a job as one of them sees them. A context manager around all that they do together.

    Attributes:
      listener: is told every word (name below `jaxlm/` to value), at each look, by the watching thread.
    """

    def __init__(self, client: Any, index: int, count: int):
        """`client` is JAX's DistributedRuntimeClient, or anything with its key_value_set and key_value_dir_get."""
        self.index, self.count, self._client = index, count, client
        self.listener: Callable[[dict[str, str]], None] | None = None
        self._done, self._ending = threading.Event(), threading.Event()
        self._leaving = threading.RLock()
        self._old: Any = None                  # the handler of SIGTERM that was there before
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def say(self, name: str, value: str) -> bool:
        """Writes a word; False if the name is taken already, or nobody listens any more."""
        try:
            self._client.key_value_set(PREFIX + name, value)
        except Exception:  # noqa: BLE001 - the service reports both as an error of the runtime
            return False
        return True

    def heard(self) -> dict[str, str]:
        """All words so far. Raises an error of the runtime when the coordinator is gone."""
        return {key.removeprefix(PREFIX): value for key, value in self._client.key_value_dir_get(PREFIX)}

    def agree(self, name: str, value: str, timeout: float) -> None:
        """Checks that every process found the same, since those that went on with different things would wait for ever.

        Args:
          name: of the thing, used once.
          value: a description, in which any difference shows.
          timeout: seconds to wait for process 0.

        Raises:
          RunError: this process found something else than process 0, or process 0 did not say in time.
        """
        if self.index == 0:
            self.say(f"same/{name}", value)
            return
        try:
            first = self._client.blocking_key_value_get(f"{PREFIX}same/{name}", int(timeout * 1000))
        except Exception as error:  # noqa: BLE001 - a time-out, or the service is gone
            raise RunError(f"process 0 did not say within {timeout:g} s which {name} it has: {error}") from error
        if first != value:
            raise RunError(f"process {self.index} has another {name} than process 0: {value}, not {first}. All processes "
                           "must see the same files; is the run directory on a file system that they share?")

    @contextlib.contextmanager
    def ending_is_told(self) -> Iterator[None]:
        """Around what all processes do in step, inside of what is tidied up afterwards: tidying up may need the others."""
        try:
            yield
        except (Stopped, RollBack):            # all do alike
            raise
        except BaseException as error:
            if is_of_a_lost_peer(error):
                self._leave(error)
            self._tell(error)
            raise

    def __enter__(self) -> "Peers":
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            # Where nothing is to be saved, SIGTERM ends this process; the loop has its own handler (`signals.StopFlag`).
            self._old = signal.signal(signal.SIGTERM, lambda number, frame: self._leave(KeyboardInterrupt()))
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)
        if error is not None and not isinstance(error, Stopped):
            self._leave(error)
        self._done.set()
        self._thread.join()

    def _tell(self, error: BaseException) -> None:
        if not self._ending.is_set():
            self._ending.set()
            status, words = last_words(error) or (1, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            self.say("end", json.dumps({"process": self.index, "status": status, "words": words}))

    def _leave(self, error: BaseException) -> None:
        """Ends this process now, with the reason. JAX's own way out would wait for those that are gone."""
        if is_of_a_lost_peer(error):
            self._end_as_another_says()
            error = RunError(f"process {self.index} lost the connection to another process, which has probably died: "
                             f"{str(error).strip().partition(chr(10))[0][:200]}")
        self._tell(error)
        end = last_words(error)
        if end is None:
            traceback.print_exception(error)
        self._exit(*(end or (1, None)))

    def _exit(self, status: int, words: str | None) -> None:
        self._leaving.acquire()                # for good: of two threads, or a signal's handler, the first one speaks
        if words:
            print(words, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        self.say(f"gone/{self.index}", "")
        deadline = time.monotonic() + GRACE + 2 * POLL
        while self.index == 0 and time.monotonic() < deadline and not self._others_are_gone():
            time.sleep(0.05)                   # JAX aborts them when this process, which keeps the words, is no more
        os._exit(status)

    def _others_are_gone(self) -> bool:
        with contextlib.suppress(Exception):
            return sum(name.startswith("gone/") for name in self.heard()) == self.count
        return True

    def _watch(self) -> None:
        while not self._done.wait(POLL):
            try:
                words = self.heard()
            except Exception:  # noqa: BLE001 - JAX ends the process when the coordinator stays away
                continue
            if self.listener is not None:
                self.listener(words)
            if "end" in words and not self._ending.wait(GRACE) and not self._done.is_set():
                self._end_with(json.loads(words["end"]))

    def _end_as_another_says(self) -> None:
        """Ends this process with the reason of the one that has ended first, if that has left one."""
        with contextlib.suppress(Exception):   # the service is gone
            words = self.heard()
            if "end" in words:
                self._end_with(json.loads(words["end"]))

    def _end_with(self, end: dict[str, Any]) -> None:
        self._exit(end["status"] or 1, f"process {self.index} stops because process {end['process']} has ended: {end['words']}")
