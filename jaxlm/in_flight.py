"""How many programs may be under way at once: everything that runs one program after another goes through `InFlight`."""

import collections
from typing import Any

import jax

# One runs while the next waits in the queue: the device never idles, and a request to stop is answered within a step or two.
AHEAD = 2


class InFlight:
    """Results of programs that may not be finished yet. Adding one waits for those before the last few."""

    def __init__(self):
        # Simulated devices share one pool of threads, where programs that pile up can keep each other's collectives waiting
        # for ever: there each program ends before the next begins.
        simulated = jax.devices()[0].platform == "cpu" and jax.local_device_count() > 1
        self._ahead = 0 if simulated else AHEAD
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> Any:
        """Counts a program that was just started, by an array (or a tree of them) that it gives, and hands that back."""
        self._results.append(result)
        while len(self._results) > self._ahead:
            jax.block_until_ready(self._results.popleft())
        return result
