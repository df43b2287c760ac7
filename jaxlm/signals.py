"""Asking a run to stop: SIGTERM and Ctrl-C set a flag that the loop reads after each step.

Several processes must stop after the same step, or those that went on would wait for ever in their next collective; and the
signal may have come to one of them alone. They agree on the step without their devices: whoever got the signal says so
(`jaxlm/stop/reason`); each process then holds its loop before the next step and says which step it has begun
(`jaxlm/stop/step/ID`); when all have, the step to stop after is one past the largest, and the loops go on to there.
"""

import signal
import sys
import threading

from jaxlm.peers import Peers


class StopFlag:
    """While entered, the first SIGTERM or SIGINT only sets `.reason`; a second one has its usual effect."""

    def __init__(self, peers: Peers | None = None, start: int = 0):
        """`peers` are the other processes, None where there are none; `start` is the step before the first one."""
        self.reason: str | None = None
        self._old: dict[int, object] = {}
        self._peers = peers
        self._gate = threading.Lock()          # held while a step is agreed on, so that no loop runs past it meanwhile
        self._held = False
        self._begun = start                    # the last step that was begun
        self._agreed: tuple[int, str] | None = None

    def reached(self, step: int) -> str | None:
        """The reason to stop after `step`, which has been begun; None to go on with the next. May wait for other processes."""
        if self._peers is None:
            return self.reason
        with self._gate:
            self._begun = step
            return self._agreed[1] if self._agreed and step == self._agreed[0] else None

    def hear(self, words: dict[str, str]) -> None:
        """What the other processes say; called by the thread that watches them, again and again."""
        if self.reason and "stop/reason" not in words:
            self._peers.say("stop/reason", f"{self.reason} to process {self._peers.index}")
        if "stop/reason" not in words or self._agreed:
            return
        if not self._held:
            self._gate.acquire()
            self._held = True
            self._peers.say(f"stop/step/{self._peers.index}", str(self._begun))
        begun = [int(value) for name, value in words.items() if name.startswith("stop/step/")]
        if len(begun) == self._peers.count:
            # Past every step that a process may have begun or, having asked just before the gate was closed, begins now.
            self._agreed = (max(begun) + 1, words["stop/reason"])
            self._gate.release()

    def _on_signal(self, number, frame):
        del frame
        self.reason = signal.Signals(number).name
        print(
            f"{self.reason}: finishing this step, then saving (a second {self.reason} stops at once)", file=sys.stderr, flush=True
        )
        self._restore()

    def _restore(self):
        while self._old:
            number, handler = self._old.popitem()
            signal.signal(number, handler)

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._on_signal)
        if self._peers is not None:
            self._peers.listener = self.hear
        return self

    def __exit__(self, *error):
        self._restore()
        if self._peers is not None:
            self._peers.listener = None
            self._peers.say(f"stop/step/{self._peers.index}", str(self._begun))      # nobody need wait for this process
