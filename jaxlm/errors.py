"""How a run ends before its time. A wrong input is a `partitioning.declaration.DeclarationError` (status 2)."""

from typing import Any

from partitioning.declaration import DeclarationError


class RunError(RuntimeError):
    """The run cannot go on, and not because the user's input is wrong. The message is complete; exit status 1."""


class Stopped(Exception):
    """The run was asked to stop (SIGTERM, Ctrl-C) and has saved; exit status 3."""


class RollBack(Exception):
    """The loop asks to go on from the newest checkpoint, past the data that led here. `facts` are a `faults.BadStep`."""

    def __init__(self, facts: Any):
        super().__init__(facts.words)
        self.facts = facts


def last_words(error: BaseException) -> tuple[int, str] | None:
    """Exit status and message of an error whose message is all that there is to say; None for any other, whose trace is shown."""
    if isinstance(error, DeclarationError):
        return 2, f"error: {error}"
    if isinstance(error, Stopped):
        return 3, str(error)
    if isinstance(error, RunError):
        return 1, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 3, "interrupted"
    if isinstance(error, OSError):
        return 1, f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}."
    return None
