"""`python -m jaxlm.checkpoint`: list, show, verify, copy, export."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlm import checkpoint
from tests.system.commands import TINY, run
from tests.system.test_resume import arrays, losses, same_bits

KEYS = ("--config.train.steps=8", "--config.train.log_every=1", "--config.checkpoint.every=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("train", f"--config={TINY}", f"--workdir={folder}", *KEYS, "--simulate_devices=2", "--config.mesh.fsdp=2")
    return folder


def test_list_and_show_say_what_there_is(whole):
    listed = json.loads(run("checkpoint", "list", whole, "--json"))["checkpoints"]
    assert [(one["step"], one["mesh"], one["checksums"]) for one in listed] == [(4, {"fsdp": 2}, True), (8, {"fsdp": 2}, True)]
    text = run("checkpoint", "list", whole)
    assert text.splitlines()[0].split() == ["step", "size", "written", "mesh", "checksums", "metrics"] and "fsdp=2" in text
    shown = json.loads(run("checkpoint", "show", f"{whole}/checkpoints/4", "--json"))
    assert (shown["step"], shown["data"]["next_batch"], shown["format"]) == (4, 4, 2)
    assert {"path": "params/embed/embedding", "shape": [264, 32], "dtype": "float32"} in [
        {**array, "shape": list(array["shape"])} for array in shown["arrays"]]
    assert "params/embed/embedding" in run("checkpoint", "show", whole)


def test_verify_names_the_damage_and_ends_with_1(whole, tmp_path):
    run("checkpoint", "copy", whole, tmp_path / "copy", "--step=8")
    assert run("checkpoint", "verify", tmp_path / "copy").strip() == "step 8: whole"
    os.truncate(tmp_path / "copy" / "checkpoints" / "8" / "state" / "_METADATA", 10)
    out = json.loads(run("checkpoint", "verify", tmp_path / "copy", "--json", status=1).splitlines()[0])
    (one,) = out["checkpoints"]
    assert (one["step"], one["state"]) == (8, "damaged") and "state/_METADATA has 10 bytes, not" in one["damage"][0]
    run("checkpoint", "export", tmp_path / "copy", tmp_path / "out", status=1)
    assert not (tmp_path / "out").exists()


def test_a_copy_is_a_run_that_goes_on(whole, tmp_path):
    run("checkpoint", "copy", f"{whole}/checkpoints/4", tmp_path / "copy")
    assert "is a run directory already" in run("checkpoint", "copy", whole, tmp_path / "copy", status=2)
    run("train", f"--workdir={tmp_path / 'copy'}", *KEYS, "--simulate_devices=2")
    assert same_bits(arrays(tmp_path / "copy", 8), arrays(whole, 8))
    assert losses(tmp_path / "copy") == {step: row for step, row in losses(whole).items() if step > 4}


@pytest.mark.parametrize("limit", [2**32, 40_000])
def test_export_has_every_parameter_under_its_name(limit, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", limit)
    flags = checkpoint.arguments().parse_args(["export", str(whole), str(tmp_path / "out")])
    assert checkpoint.main(flags) == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 1 if limit == 2**32 else len(files) > 2
    exported = {name: x for file in files for name, x in load_file(file).items()}
    expected = {"/".join(key.strip("[]'") for key in name.split("][")): x for name, x in arrays(whole, 8).items()}
    expected = {name.replace("'", "").removeprefix("params/"): x for name, x in expected.items() if name.startswith("params")}
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[name], expected[name]) for name in exported)
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == exported.keys() and set(index.values()) == {file.name for file in files}


def test_mistakes_are_told(whole, tmp_path):
    assert "is no run directory" in run("checkpoint", "list", tmp_path, status=2)
    assert "expected latest, best or one of the saved steps: 4, 8" in run("checkpoint", "show", whole, "--step=5", status=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert "give a folder that is new or empty" in run("checkpoint", "export", whole, tmp_path / "full", status=2)


def test_a_checkpoint_that_was_deleted_half_way_does_not_hide_the_others(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "4" / "about")
    out = run("checkpoint", "list", tmp_path / "copy")
    assert "cannot be read: 4" in out and any(line.startswith("8 ") for line in out.splitlines())
    listed = json.loads(run("checkpoint", "list", tmp_path / "copy", "--json"))
    assert listed["unreadable"] == [4] and [one["step"] for one in listed["checkpoints"]] == [8]
