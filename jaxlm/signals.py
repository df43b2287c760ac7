"""Asking a run to stop: SIGTERM and Ctrl-C set a flag that the loop reads after each step."""

import signal
import sys


class StopFlag:
    """While entered, the first SIGTERM or SIGINT only sets `.reason`; a second one has its usual effect."""

    def __init__(self):
        self.reason: str | None = None
        self._old: dict[int, object] = {}

    def agreed(self) -> str | None:
        """The reason that any process has to stop. All processes must ask at the same step: those that went on alone would
        wait for ever in their next collective."""
        import jax

        if jax.process_count() == 1:
            return self.reason
        import numpy as np
        from jax.experimental import multihost_utils

        number = signal.Signals[self.reason].value if self.reason else 0
        numbers = multihost_utils.process_allgather(np.array(number, np.int32))
        return signal.Signals(int(numbers.max())).name if numbers.any() else None

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
        return self

    def __exit__(self, *error):
        self._restore()
