"""metrics.jsonl: whole rows, readable at once, and nothing past a restored step."""

import errno
import json
import os

import numpy as np
import pytest

from jaxlm.logs import MetricsFile, drop_rows_after, read_rows
from jaxlm.logs.metrics_file import plain


def test_a_row_can_be_read_before_the_file_is_closed(tmp_path):
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.write({"step": 1, "loss": 2.5})
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 2.5}]
    file.close()


def test_opening_again_appends(tmp_path):
    for step in (1, 2):
        file = MetricsFile(tmp_path / "metrics.jsonl")
        file.write({"step": step})
        file.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("value, expected", [
    (np.float32(0.5), 0.5), (np.int64(3), 3), (float("nan"), None), (np.float32("inf"), None), (True, True), ("text", "text"),
    (None, None), (7, 7)])
def test_values_become_pythons_own_and_what_is_not_finite_becomes_none(value, expected):
    assert plain(value) is expected or (plain(value) == expected and type(plain(value)) is type(expected))


def test_rows_past_the_restored_step_go_and_the_others_stay_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1, "loss":  2}\n{"step": 2}\n{"step": 2, "eval_loss": 1.5}\n'
    path.write_bytes(kept + b'{"step": 3}\n{"step": 4, "lo')
    assert drop_rows_after(path, 2) == 2
    assert path.read_bytes() == kept
    assert drop_rows_after(path, 2) == 0
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_last_line_cut_short_goes_even_if_it_happens_to_parse(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert drop_rows_after(path, 10) == 1
    assert read_rows(path) == [{"step": 1}]


def test_dropping_from_a_file_that_is_not_there_does_nothing(tmp_path):
    assert drop_rows_after(tmp_path / "metrics.jsonl", 3) == 0
    assert read_rows(tmp_path / "metrics.jsonl") == [] and not list(tmp_path.iterdir())


def test_a_crash_while_dropping_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError):
        drop_rows_after(path, 1)
    assert len(read_rows(path)) == 2


class FullDisk:
    """A raw file that takes `room` bytes more and then has no space."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def fileno(self):
        return self._file.fileno()

    def write(self, data):
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[:self._room])
        self._room -= written
        return written


@pytest.mark.parametrize("room", [0, 5])
def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part_of_itself(tmp_path, room):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    file._file = FullDisk(file._file, room)
    with pytest.raises(OSError, match="No space"):
        file.write({"step": 2, "loss": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == json.dumps({"step": 1}) + "\n"
