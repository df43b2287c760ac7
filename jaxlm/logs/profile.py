"""A profiler trace of declared steps, for XProf and TensorBoard's profile page."""

import pathlib
from collections.abc import Callable

from jaxlm.errors import RunError


class ProfileWindow:
    """Traces the steps from `first` to `last`, both included, into `directory`.

        window = ProfileWindow.declared(config.log.profile_steps, workdir / 'profile')
        for step in ...:                      # the number of the step that is about to run
            window.before(step)
            state, numbers = train_step(state, batch)
            window.after(step, lambda: jax.block_until_ready(state))
        window.close()

    Steps are dispatched ahead of the device; `after` waits for the last one, so that the trace holds all of it.
    """

    def __init__(self, first: int, last: int, directory: pathlib.Path | str):
        self._first, self._last, self._directory = first, last, pathlib.Path(directory)
        self._running = False

    @classmethod
    def declared(cls, profile_steps: tuple[int, ...], directory: pathlib.Path | str) -> "ProfileWindow":
        """The window that config.log.profile_steps declares; () never opens."""
        first, last = profile_steps or (0, -1)
        return cls(first, last, directory)

    def before(self, step: int) -> None:
        """Call before a step is dispatched. A run that resumes inside the window traces what is left of it."""
        if not self._running and self._first <= step <= self._last:
            import jax
            try:
                jax.profiler.start_trace(str(self._directory))
            except RuntimeError as error:
                raise RunError(f"the profiler trace of config.log.profile_steps could not start: {error}") from error
            self._running = True

    def after(self, step: int, wait: Callable[[], object] | None = None) -> bool:
        """Call after a step is dispatched; True when the trace has just been written."""
        if not self._running or step < self._last:
            return False
        if wait is not None:
            wait()
        self.close()
        return True

    def close(self) -> None:
        """Writes the trace, if one runs; a run that stops inside the window keeps what it has."""
        if self._running:
            import jax
            self._running = False
            jax.profiler.stop_trace()
