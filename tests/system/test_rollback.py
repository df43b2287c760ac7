"""Going back: the spike is in the data, the run passes it by, and interruptions change nothing of how it does."""

import random
import shutil

import pytest

from jaxlm.checkpoints import Checkpoints
from jaxlm.logs import read_rows
from tests.system.commands import TINY, run
from tests.system.test_processes import finish, processes
from tests.system.test_resume import arrays, losses, same_bits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text that is learned in a few steps, with a stretch of noise in it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    noise = "".join(random.Random(0).choices([chr(i) for i in range(33, 127)], k=700))
    path.write_text("abcd" * 4000 + noise + "abcd" * 6000)
    return path


def keys(text, folder, *more):
    return (f"--config={TINY}", f"--workdir={folder}", f"--config.data.train={text}", "--config.train.steps=90",
            "--config.train.log_every=1", "--config.checkpoint.every=8", "--config.checkpoint.keep=100",
            "--config.optimizer.learning_rate=5e-3", "--config.faults.spike_threshold=1.5", "--config.faults.on_spike=rollback",
            *more)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run("train", *keys(text, folder, "--config.faults.max_rollbacks=20"))


def rows(folder):
    return [row for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def test_a_spike_sends_the_run_back_and_past_the_data(whole):
    folder, out = whole
    last = rows(folder)[-1]
    assert [row["step"] for row in rows(folder)] == list(range(1, 91))
    assert 1 <= last["rollbacks"] == out.count("over config.faults.spike_threshold") and last["left_out"] >= last["rollbacks"]
    assert f"(rollback {last['rollbacks']} of 20)" in out
    assert Checkpoints(folder / "checkpoints").about(90)["data"]["next_batch"] == 90 + last["left_out"]


def test_a_run_that_is_stopped_after_going_back_ends_with_the_same_bits(whole, text, tmp_path):
    """The batches that are left out are counted in the checkpoint."""
    went_back = next(row["step"] for row in rows(whole[0]) if row["rollbacks"])
    more = ("--config.faults.max_rollbacks=20",)
    run("train", *keys(text, tmp_path, *more, f"--config.train.stop_at={went_back}"))
    run("train", *keys(text, tmp_path, *more))
    assert losses(tmp_path) == losses(whole[0]) and same_bits(arrays(tmp_path, 90), arrays(whole[0], 90))


def test_a_checkpoint_that_a_rollback_goes_back_behind_is_moved_aside(whole, text, tmp_path):
    """It was written because the run was stopped; the steps after it are taken anew, with other data, and saved."""
    first = next(row["step"] for row in rows(whole[0]) if row["rollbacks"])
    scheduled = (first - 1) // 8 * 8
    more = ("--config.faults.max_rollbacks=20",)
    run("train", *keys(text, tmp_path, *more, f"--config.train.stop_at={scheduled + 2}"))
    out = run("train", *keys(text, tmp_path, *more))
    assert f"back to step {scheduled}" in out and f"{scheduled + 2}.rolled_back" in out
    assert losses(tmp_path) == losses(whole[0]) and same_bits(arrays(tmp_path, 90), arrays(whole[0], 90))
    assert scheduled + 2 not in Checkpoints(tmp_path / "checkpoints").steps()


def test_a_run_that_dies_before_it_could_save_goes_back_again_in_the_same_way(whole, text, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    first = next(row["step"] for row in rows(whole[0]) if row["rollbacks"])
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) >= first:
            shutil.rmtree(path)
    out = run("train", *keys(text, tmp_path / "run", "--config.faults.max_rollbacks=20"))
    assert "rollback 1 of 20" in out
    assert losses(tmp_path / "run") == losses(whole[0]) and same_bits(arrays(tmp_path / "run", 90), arrays(whole[0], 90))


def test_the_number_of_rollbacks_is_bounded_and_what_was_saved_stays(text, tmp_path):
    out = run("train", *keys(text, tmp_path, "--config.faults.max_rollbacks=0"), status=1)
    assert "gone back 0 times already (config.faults.max_rollbacks)" in out
    assert "Nothing was saved since; the newest checkpoint is" in out
    out = run("train", *keys(text, tmp_path, "--config.faults.max_rollbacks=20"))
    assert "changed: config.faults.max_rollbacks: 0 -> 20" in out and "step 90/90" in out


def test_a_spike_that_is_skipped_is_counted_and_the_run_ends(text, tmp_path):
    run("train", *keys(text, tmp_path, "--config.faults.on_spike=skip"))
    last = rows(tmp_path)[-1]
    assert last["spikes"] == last["skipped"] >= 1 and last["step"] == 90


def test_two_processes_go_back_together_as_one_does(whole, text, tmp_path):
    """And compare their replicas on the way."""
    more = ("--config.faults.max_rollbacks=20", "--config.mesh.data=4", "--config.faults.replica_check_every=16")
    codes, ends = finish(processes(2, *keys(text, tmp_path, *more)))
    assert codes == [0, 0], ends
    ours, theirs = rows(tmp_path), rows(whole[0])
    assert [(row["step"], row["rollbacks"], row["left_out"]) for row in ours] == [
        (row["step"], row["rollbacks"], row["left_out"]) for row in theirs]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)) < 1e-4
