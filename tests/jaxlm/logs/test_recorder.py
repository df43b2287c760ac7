"""The recorder: one call reaches every place that was asked for, and only process 0 writes."""

import errno
import io
import json
import sys
import types

import jax.numpy as jnp
import pytest

from jaxlm.errors import RunError
from jaxlm.config import LogConfig
from jaxlm.logs import Recorder, read_rows
from jaxlm.logs.console import Console
from jaxlm.logs.tensorboard import TensorBoard
from partitioning.declaration import DeclarationError


def events(folder):
    """(step, tag, value) of all scalars in a folder's event files, read by their own format: length, crc, data, crc."""
    from tensorboardX.proto import event_pb2
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12:12 + size])
            data = data[16 + size:]
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value
            if event.HasField("session_log"):
                yield event.step, "session", event.session_log.status


def test_a_row_goes_to_the_file_to_tensorboard_and_to_the_console(tmp_path, capsys):
    with Recorder(tmp_path, LogConfig(), total_steps=100) as recorder:
        recorder.row({"step": 10, "loss": jnp.float32(2.5), "grad_norm": float("inf"), "tokens": 320,
                      "tokens_per_second": 51234.0, "mfu": None})
        assert read_rows(tmp_path / "metrics.jsonl") == [
            {"step": 10, "loss": 2.5, "grad_norm": None, "tokens": 320, "tokens_per_second": 51234.0, "mfu": None}]
        assert set(events(tmp_path / "tensorboard")) == {
            (10, "loss", 2.5), (10, "tokens", 320.0), (10, "tokens_per_second", 51234.0)}
    assert capsys.readouterr().out == "step 10/100: loss 2.5000, 51.2k tokens/s\n"


def test_evaluations_samples_and_losses_that_are_not_finite_are_lines_too(tmp_path, capsys):
    with Recorder(tmp_path, LogConfig(tensorboard=False), total_steps=9) as recorder:
        recorder.row({"step": 3, "eval_loss": 1.25})
        recorder.row({"step": 4, "loss": float("nan"), "mfu": 0.41})
        recorder.text(4, "to be")
    assert capsys.readouterr().out.splitlines()[:4] == [
        "step 3/9: eval loss 1.2500", "step 4/9: loss not finite, MFU 41.0%", "step 4, sample:", "to be"]
    assert not (tmp_path / "tensorboard").exists()


def test_only_the_main_process_writes(tmp_path, capsys):
    with Recorder(tmp_path / "run", LogConfig(wandb="project"), total_steps=9, is_main=False) as recorder:
        assert recorder.row({"step": 1, "loss": jnp.float32(1.0)}) == {"step": 1, "loss": 1.0}
        recorder.text(1, "x")
        recorder.line("x")
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_a_resume_drops_the_rows_that_will_come_again_and_tells_tensorboard(tmp_path):
    for start, steps in ((0, (0, 1, 2, 3)), (2, (3, 4)), (0, (1,))):
        with Recorder(tmp_path, LogConfig(), total_steps=9, start_step=start, console=False) as recorder:
            for step in steps:
                recorder.row({"step": step, "start": start})
        if start == 2:
            rows = read_rows(tmp_path / "metrics.jsonl")
            assert [(row["step"], row["start"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2)]
            assert (3, "session", 1) in set(events(tmp_path / "tensorboard"))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]       # a fresh start in an old folder
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3                        # within a second: none is overwritten


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_with_loss_speed_and_time_left():
    stream = Terminal()
    console = Console(total_steps=100, start_step=40, stream=stream)
    console._bar.mininterval = 0
    console._bar.start_t -= 50
    console.row({"step": 50, "loss": 1.5, "tokens_per_second": 2e6})
    console.row({"step": 50, "eval_loss": 1.4})
    console.close()
    shown = stream.getvalue()
    assert "50/100" in shown and "loss 1.5000, 2.0M tokens/s" in shown and "<04:" in shown
    assert "step 50/100: eval loss 1.4000" in shown


def test_a_full_disk_is_one_clear_error_and_what_was_written_stays(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, LogConfig(), total_steps=9, console=False)
    recorder.row({"step": 1, "loss": 3.0})
    monkeypatch.setattr(TensorBoard, "row", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunError, match="No space left on device.*intact.*same command") as caught:
        recorder.row({"step": 2, "loss": 2.0})
    assert str(tmp_path) in str(caught.value) and "step 2" in str(caught.value)
    assert read_rows(tmp_path / "metrics.jsonl")[0] == {"step": 1, "loss": 3.0}


def test_an_error_of_the_run_is_not_hidden_by_one_of_closing(tmp_path, monkeypatch):
    monkeypatch.setattr(TensorBoard, "close", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(KeyError, match="the run's own"):
        with Recorder(tmp_path, LogConfig(), total_steps=9, console=False):
            raise KeyError("the run's own")
    with pytest.raises(RunError, match="No space"):
        Recorder(tmp_path, LogConfig(), total_steps=9, console=False).close()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Not a directory"):
        Recorder(tmp_path / "file" / "run", LogConfig(), total_steps=9)


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.rows, self.finished, self.defined = arguments, [], False, []

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


def test_a_resume_goes_on_with_the_same_run_of_weights_and_biases(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **a: runs.append(FakeRun(**a)) or runs[-1]))
    for start in (0, 5):
        with Recorder(tmp_path, LogConfig(wandb="plays"), total_steps=9, start_step=start, console=False,
                      run_config={"a": {"b": 1}}) as recorder:
            recorder.row({"step": start + 1, "loss": 2.0, "mfu": float("nan")})
            recorder.text(start + 1, "to be")
    first, second = runs
    assert first.arguments["project"] == "plays" and first.arguments["config"] == {"a": {"b": 1}}
    assert first.arguments["id"] == second.arguments["id"] and first.finished and second.arguments["resume"] == "allow"
    assert second.rows == [{"step": 6, "loss": 2.0}, {"step": 6, "sample": "to be"}]
    assert ("*", "step") in second.defined


def test_asking_for_weights_and_biases_without_the_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DeclarationError, match="pip install -e"):
        Recorder(tmp_path, LogConfig(wandb="plays"), total_steps=9)


def test_every_line_of_the_file_is_strict_json(tmp_path):
    with Recorder(tmp_path, LogConfig(tensorboard=False), total_steps=9, console=False) as recorder:
        recorder.row({"step": 1, "loss": float("nan"), "note": "ü\n"})
    line, = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {"step": 1, "loss": None, "note": "ü\n"}
