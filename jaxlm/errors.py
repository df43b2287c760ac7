"""How a run ends before its time. A wrong input is a `partitioning.declaration.DeclarationError` (status 2)."""


class RunError(RuntimeError):
    """The run cannot go on, and not because the user's input is wrong. The message is complete; exit status 1."""


class Stopped(Exception):
    """The run was asked to stop (SIGTERM, Ctrl-C) and has saved; exit status 3."""
