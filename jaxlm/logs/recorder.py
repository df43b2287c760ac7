"""The recorder: the training loop says a number once, and it goes to every place that was asked for.

Of several processes only the first one writes. A place that cannot be written to, such as a full disk, ends the run with one
clear message; what is on disk already stays as it is, and the same command goes on from the last checkpoint.
"""

import contextlib
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxlm.errors import RunError
from jaxlm.config import LogConfig
from jaxlm.logs.console import Console
from jaxlm.logs.metrics_file import MetricsFile, drop_rows_after, plain
from jaxlm.logs.tensorboard import TensorBoard
from jaxlm.logs.weights_and_biases import WeightsAndBiases


class Recorder:
    """Writes rows of numbers into a run directory and shows them. A context manager; `close` is safe to repeat."""

    def __init__(self, directory: pathlib.Path | str, config: LogConfig, *, total_steps: int, start_step: int = 0,
                 console: bool = True, is_main: bool = True, run_config: Mapping[str, Any] | None = None):
        """Opens the places.

        Args:
          directory: the run directory.
          total_steps: the last step of the run, for the progress bar.
          start_step: the step that was restored, 0 for a fresh start. Rows past it are dropped: they will be computed again.
          console: whether to show anything.
          is_main: whether this is process 0; the others record nothing.
          run_config: the run's configuration, for Weights & Biases.

        Raises:
          DeclarationError: the wandb package is asked for and missing.
          RunError: a file cannot be written.
        """
        self._directory = pathlib.Path(directory)
        self._sinks: list[Any] = []
        self._file = self._console = None
        if not is_main:
            return
        with self._explained("the start"):
            if config.wandb:                   # first: it may refuse, and then nothing has been touched
                self._directory.mkdir(parents=True, exist_ok=True)
                self._sinks.append(WeightsAndBiases(self._directory, config.wandb, run_config))
            drop_rows_after(self._directory / "metrics.jsonl", start_step or -1)
            self._file = MetricsFile(self._directory / "metrics.jsonl")
            if config.tensorboard:
                self._sinks.append(TensorBoard(self._directory / "tensorboard", start_step))
        self._console = Console(total_steps, start_step) if console else None

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Records one row; `step` is required, scalars of numpy and JAX are welcome (they are waited for).

        Rows of a training step have step, loss, grad_norm, learning_rate, tokens, tokens_per_second, step_seconds, mfu;
        rows of an evaluation have step, eval_loss.

        Returns:
          The row as it was written: plain values, None for what is not finite.

        Raises:
          RunError: it could not be written.
        """
        values = {name: plain(value) for name, value in row.items()}
        if self._file is None:
            return values
        with self._explained(f"step {values['step']}"):
            self._file.write(values)
            for sink in self._sinks:
                sink.row(values)
        if self._console:
            self._console.row(values)
        return values

    def text(self, step: int, sample: str) -> None:
        """Records a sample of generated text, and shows it."""
        with self._explained(f"step {step}"):
            for sink in self._sinks:
                sink.text(step, sample)
        if self._console:
            self._console.line(f"step {step}, sample:\n{sample}\n")

    def line(self, text: str) -> None:
        """Shows a line on the console, above the progress bar."""
        if self._console:
            self._console.line(text)

    def close(self) -> None:
        """Ends the bar and closes the files."""
        sinks, self._sinks = self._sinks, []
        file, self._file = self._file, None
        console, self._console = self._console, None
        if console:
            console.close()
        with self._explained("the end"):
            for place in [*sinks, *([file] if file else [])]:
                place.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except RunError:
            if error is None:                  # the first error is the one to show
                raise

    @contextlib.contextmanager
    def _explained(self, when: str):
        """Turns an OSError into a message that says what is safe and what to do."""
        try:
            yield
        except OSError as error:
            raise RunError(f"the logs of {self._directory} could not be written at {when}: {error.strerror or error}. "
                           "The rows and checkpoints saved so far are intact. Make room (or the directory writable) and run the "
                           "same command again; it goes on from the last checkpoint.") from error
