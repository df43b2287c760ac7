"""What a person sees of a run: a progress bar on a terminal, else a plain line per logged step (for files and schedulers)."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Console:
    """Shows progress from `start_step` to `total_steps` on `stream`."""

    def __init__(self, total_steps: int, start_step: int = 0, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._total = total_steps
        self._bar = None
        if self._stream.isatty():
            from tqdm import tqdm
            self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True, file=self._stream,
                             bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]")

    def row(self, row: Mapping[str, Any]) -> None:
        """Shows a logged step or an evaluation."""
        if self._bar is None or "loss" not in row:
            self.line(describe(row, self._total))
        if self._bar is not None and "loss" in row:
            self._bar.set_postfix_str(", ".join(_parts(row)), refresh=False)
            self._bar.update(row["step"] - self._bar.n)

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def describe(row: Mapping[str, Any], total_steps: int) -> str:
    """One row as a line: 'step 20/100: loss 2.31, 51.2k tokens/s, MFU 41.0%'."""
    return f"step {row['step']}/{total_steps}: " + ", ".join(_parts(row))


def _parts(row: Mapping[str, Any]) -> list[str]:
    parts = []
    for name in ("loss", "eval_loss"):
        if name in row:
            value = row[name]
            parts.append(f"{name.replace('_', ' ')} {'not finite' if value is None else format(value, '.4f')}")
    if row.get("tokens_per_second") is not None:
        parts.append(f"{shorten(row['tokens_per_second'])} tokens/s")
    if row.get("mfu") is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    return parts


def shorten(number: float) -> str:
    """51234.0 as '51.2k'."""
    for size, unit in _UNITS:
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
