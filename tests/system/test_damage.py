"""Damaged checkpoints: each is seen and named, none is loaded as good, and a run goes on from the one before."""

import json
import os
import pathlib
import shutil

import jax
import pytest

from jaxlm import manifest, starting_point
from jaxlm.commandline import load_config
from jaxlm.config import to_config
from jaxlm.checkpoints import Checkpoints
from jaxlm.errors import RunError
from tests.system.commands import TINY, run
from tests.system.test_resume import arrays, losses, same_bits

KEYS = ("--config.train.steps=12", "--config.train.log_every=1", "--config.checkpoint.every=4", "--config.checkpoint.keep=3")
OLD = pathlib.Path(__file__).parents[1] / "data" / "format1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("train", f"--config={TINY}", f"--workdir={folder}", *KEYS)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return pathlib.Path(shutil.copytree(whole, tmp_path / "run"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bit flipped": flip,
    "removed": lambda path: path.unlink(),
}


def found(folder):
    return starting_point.find(load_config(str(folder / "config.json")), folder)


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_any_file_of_the_newest_checkpoint_is_named_and_the_one_before_is_taken(how, whole, copy):
    newest = copy / "checkpoints" / "12"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    kinds = {path.relative_to(newest).parts[0] for path in files}
    assert {"state", "about", "manifest.json"} < kinds and len(files) > 10
    for path in files:
        name, bytes_before = path.relative_to(newest).as_posix(), path.read_bytes()
        DAMAGE[how](path)
        if name in manifest.NOT_IN_IT[1:]:     # harmless: the same numbers come out
            assert found(copy).step == 12
            assert same_bits(arrays(copy, 12), arrays(whole, 12))
        elif bytes_before != (path.read_bytes() if path.exists() else None):
            point = found(copy)
            assert (point.step, point.damaged) == (8, (12,)), name
            assert len(point.notes) == 1 and f"{name} " in point.notes[0] and str(newest) in point.notes[0]
        path.write_bytes(bytes_before)
    assert found(copy).damaged == () and found(copy).step == 12


def test_a_run_goes_on_from_the_checkpoint_before_and_moves_the_damaged_one_aside(whole, copy):
    newest = copy / "checkpoints" / "12"
    (data,) = (path for path in (newest / "state" / "d").iterdir() if path.stat().st_size > 2000)
    flip(data)
    damaged = data.read_bytes()
    out = run("train", f"--config={TINY}", f"--workdir={copy}", *KEYS)
    assert f"damaged: {newest} is not used: state/d/{data.name} is not as it was written" in out
    assert "weights: the checkpoint of step 8 in the run directory" in out and "moved aside to" in out
    assert losses(copy) == losses(whole) and same_bits(arrays(copy, 12), arrays(whole, 12))
    assert (copy / "checkpoints" / "12.damaged" / "state" / "d" / data.name).read_bytes() == damaged
    assert found(copy).notes == ()


def test_where_all_are_damaged_nothing_is_started_and_nothing_touched(copy):
    for step in (4, 8, 12):
        (copy / "checkpoints" / str(step) / "state" / "_METADATA").unlink()
    before = sorted(path for path in copy.rglob("*"))
    err = run("train", f"--config={TINY}", f"--workdir={copy}", *KEYS, status=1)
    assert "holds 4, 8, 12, but none of them is whole. Nothing was touched" in err
    assert err.count("state/_METADATA is missing") == 3
    assert sorted(path for path in copy.rglob("*")) == before


def test_what_was_moved_aside_is_no_reason_to_start_anew(copy):
    for step in (4, 8, 12):
        (copy / "checkpoints" / str(step)).rename(copy / "checkpoints" / f"{step}.damaged")
    err = run("train", f"--config={TINY}", f"--workdir={copy}", *KEYS, status=1)
    assert "12.damaged, 4.damaged, 8.damaged, which were moved aside" in err and "Nothing was touched" in err


@pytest.mark.parametrize("command, keys", [
    ("evaluate", ("{run}",)),
    ("generate", ("{run}", "--prompt=To", "--max_new_tokens=2")),
    ("train", (f"--config={TINY}", "--workdir={run}-2", "--config.checkpoint.restore_from={run}")),
])
def test_a_checkpoint_that_was_asked_for_is_not_replaced_by_another(command, keys, copy):
    flip(copy / "checkpoints" / "12" / "state" / "manifest.ocdbt")
    err = run(command, *(key.format(run=copy) for key in keys), status=1)
    assert "checkpoints/12 is damaged: state/manifest.ocdbt is not as it was written" in err
    assert "Nothing was changed. Other checkpoints there: 4, 8." in err


def test_a_checkpoint_of_the_first_format_is_read_and_said_to_be_unverified(tmp_path):
    """Kept as it was written then; what follows it is what follows the same two steps now."""
    folder, again = tmp_path / "old", tmp_path / "again"
    shutil.copytree(OLD, folder)
    config = f"--config={OLD}/config.json"
    out = run("train", config, f"--workdir={folder}", "--config.train.stop_at=4")
    assert "the checkpoint of step 2 in the run directory, not verified: it was written without checksums" in out
    run("train", config, f"--workdir={again}", "--config.train.stop_at=4")
    for step in (3, 4):
        assert losses(folder)[step] == pytest.approx(losses(again)[step], abs=1e-5)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"2", "4"}
    assert (folder / "checkpoints" / "4" / manifest.NAME).exists()


def test_a_manifest_that_was_lost_is_damage_and_no_older_format(copy):
    (copy / "checkpoints" / "12" / manifest.NAME).unlink()
    assert found(copy).damaged == (12,)


def test_what_stays_is_the_newest_every_so_many_and_the_best(tmp_path):
    config = to_config({"checkpoint": {"keep": 1, "keep_every": 4, "best_metric": "eval_loss"}}).checkpoint
    checkpoints = Checkpoints(tmp_path / "checkpoints", config)
    for step, loss in enumerate((3.0, 1.0, 2.0, None, 2.5, None, 2.2), 1):
        about = {} if loss is None else {"metrics": {"eval_loss": loss}}
        checkpoints.save(step, {"params": {"kernel": jax.numpy.full((4,), step)}}, {"format": 2, **about})
    checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2, 4, 7]
    with pytest.raises(RunError, match="cannot be read"):
        Checkpoints(tmp_path / "checkpoints").restore(3, {})


def test_the_one_that_a_rollback_goes_back_to_stays(tmp_path):
    """Those that were written because the run was stopped do not push it out."""
    config = to_config({"checkpoint": {"keep": 2, "every": 4}}).checkpoint
    checkpoints = Checkpoints(tmp_path / "checkpoints", config)
    for step in (4, 8, 9, 10, 11):
        checkpoints.save(step, {"params": {"kernel": jax.numpy.full((4,), step)}}, {"format": 2})
    checkpoints.close()
    assert checkpoints.steps() == [8, 10, 11]


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_begun(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", to_config({}).checkpoint)

    def mkdir(path, *args, **kwargs):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    with pytest.raises(RunError, match="step 2 could not be written .*: no permission to write. .* whole: none"):
        checkpoints.save(2, {"params": {"kernel": jax.numpy.ones((4,))}}, {"format": 2})
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_save_that_fails_leaves_nothing_and_the_next_ones_are_made(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", to_config({}).checkpoint)
    state = {"params": {"kernel": jax.numpy.ones((4,))}}
    checkpoints.save(1, state, {"format": 2})
    checkpoints.wait()
    write = manifest.write
    monkeypatch.setattr(manifest, "write", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    checkpoints.save(2, state, {"format": 2})
    with pytest.raises(RunError, match=r"step 2 could not be written .* no space left on the disk. .* that are whole: 1\."):
        checkpoints.wait()
    monkeypatch.setattr(manifest, "write", write)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1"} and checkpoints.steps() == [1]
    for step in (2, 3):
        checkpoints.save(step, state, {"format": 2})
    checkpoints.close()
    assert checkpoints.steps() == [2, 3] and checkpoints.damage(3) == []


@pytest.mark.parametrize("reset, first", [("optimizer", 9), ("step", 1), ("data", 9), ("optimizer,step,data", 1)])
def test_what_is_reset_starts_anew_and_the_rest_goes_on(reset, first, whole, tmp_path):
    keys = (f"--config={TINY}", f"--config.checkpoint.restore_from={whole}/checkpoints/8", "--config.checkpoint.restore=all",
            f"--config.checkpoint.reset={reset}", "--config.train.steps=12", "--config.train.log_every=1")
    out = run("train", *keys, f"--workdir={tmp_path / 'run'}", "--config.train.stop_at=12")
    parts = reset.split(",")
    assert f"the whole state but for {', '.join(parts)})" in out
    assert min(losses(tmp_path / "run")) == first
    there, here = arrays(whole, 8), arrays(tmp_path / "run", 12)
    next_batch = Checkpoints(tmp_path / "run" / "checkpoints").about(12)["data"]["next_batch"]
    steps = 12 - first + 1
    assert next_batch == (steps if "data" in parts else 8 + steps)
    before = 0 if "optimizer" in parts else 8              # updates go with the averages that they correct, whatever the step
    assert int(here["['counters']['updates']"]) == before + steps and there.keys() == here.keys()


def test_a_checkpoint_under_another_ones_name_is_damage(copy):
    (copy / "checkpoints" / "8").rename(copy / "checkpoints" / "50")
    point = found(copy)
    assert (point.step, point.damaged) == (12, (50,)) and "it is that of step 8, under another name" in point.notes[0]


def test_a_checkpoint_of_a_format_to_come_is_left_alone(copy):
    folder = copy / "checkpoints" / "12"
    about = json.loads((folder / "about" / "metadata").read_text())
    (folder / "about" / "metadata").write_text(json.dumps({**about, "format": 99}))
    (folder / manifest.NAME).unlink()
    manifest.write(folder)
    with pytest.raises(RunError, match="is of format 99, and this program knows 2 and older"):
        found(copy)


def test_a_run_whose_checkpoints_are_gone_does_not_start_anew(copy):
    (copy / "checkpoints").rename(copy / "elsewhere")
    rows = (copy / "metrics.jsonl").read_text()
    err = run("train", f"--config={TINY}", f"--workdir={copy}", *KEYS, status=1)
    assert "has logged steps, but its folder checkpoints is gone" in err and (copy / "metrics.jsonl").read_text() == rows
