"""TensorBoard event files.

tensorboardX's SummaryWriter hands events to a thread through a short queue; when a full disk ends that thread, the queue
fills and training hangs. Its file writer is used directly instead: a handful of scalars per logged step costs nothing, and an
error comes out where it happens.
"""

import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any


class TensorBoard:
    """Appends to a new event file in `directory`. Raises OSError."""

    def __init__(self, directory: pathlib.Path, start_step: int = 0):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2
        self._event = event_pb2.Event
        directory.mkdir(parents=True, exist_ok=True)
        # The name has seconds only: the suffix keeps a quick resume from overwriting.
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
        if start_step:                         # viewers then hide what an earlier file has from this step on
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(start_step + 1, session_log=session)
        self._writer.flush()

    def row(self, row: Mapping[str, Any]) -> None:
        """Writes every number of a row but its step as a scalar of that name."""
        from tensorboardX.summary import scalar
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._write(row["step"], summary=scalar(name, value))
        self._writer.flush()

    def text(self, step: int, sample: str) -> None:
        """Writes a text, shown as it is (indented, or Markdown would eat its line breaks)."""
        from tensorboardX.summary import text
        self._write(step, summary=text("sample", "".join(f"    {line}\n" for line in sample.splitlines())))
        self._writer.flush()

    def _write(self, step: int, **content) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self._writer.close()
