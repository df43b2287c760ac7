"""Mixtures and packed documents through the real commands: one order, whatever happens to the run."""

import json

import numpy as np
import pytest

from jaxlm.commandline import load_config
from jaxlm.logs import read_rows
from tests.system.commands import TINY, run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"Number {i} is {'odd' if i % 2 else 'even'}" + ", and so on" * (i % 5) + "." for i in range(300)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "b.txt").write_text("To be, or not to be: that is the question. " * 60)
    return folder


def keys(corpus, workdir, **options):
    train = ({"paths": str(corpus / "a.jsonl"), "name": "numbers", "weight": 3},
             {"paths": str(corpus / "b.txt"), "name": "play", "weight": 1})
    values = {"data.train": train, "data.pack": "best_fit", "data.sequence_length": 64, "data.eval_fraction": 0.0,
              "train.steps": 12, "train.log_every": 1, **options}
    return [f"--config={TINY}", f"--workdir={workdir}", *(f"--config.{key}={value}" for key, value in values.items())]


def losses(workdir):
    return {row["step"]: row["loss"] for row in read_rows(workdir / "metrics.jsonl")}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return run("train", *keys(corpus, workdir)), workdir


def test_shares_and_padding_are_said_and_logged(whole):
    out, workdir = whole
    assert "numbers: " in out and "share 75.00%" in out and "of the places are padding" in out
    rows = read_rows(workdir / "metrics.jsonl")
    assert all(abs(row["share_numbers"] + row["share_play"] - 1) < 1e-9 for row in rows)
    assert 0.6 < rows[-1]["share_numbers"] < 0.9 and all(0.5 < row["target_share"] <= 1 for row in rows)


def test_a_resume_on_another_mesh_goes_on_in_the_same_order(corpus, whole, tmp_path):
    """Stopped at a step that nothing depends on, and gone on with in a pipeline on four devices instead of one."""
    stop = int(np.random.default_rng().integers(1, 11))
    run("train", *keys(corpus, tmp_path, **{"train.stop_at": stop}))
    mesh = {"mesh.fsdp": 2, "mesh.pipe": 2, "pipeline.num_microbatches": 4}
    run("train", *keys(corpus, tmp_path, **mesh), "--simulate_devices=4")
    mine, other = losses(tmp_path), losses(whole[1])
    assert mine.keys() == other.keys()
    np.testing.assert_allclose([mine[s] for s in mine], [other[s] for s in mine], rtol=1e-5, err_msg=f"stopped at {stop}")


def test_other_weights_need_a_rule_and_then_go_on(corpus, whole, tmp_path):
    run("train", *keys(corpus, tmp_path, **{"train.stop_at": 3}))
    train = json.loads((tmp_path / "config.json").read_text())["data"]["train"]
    train[0]["weight"] = 1
    changed = keys(corpus, tmp_path, **{"data.train": tuple(train)})
    out = run("train", *changed, status=2)
    assert "config.data.train" in out and "--allow_change" in out
    out = run("train", *changed, "--allow_change", status=2)
    assert "numbers 0.75 play 0.25 -> numbers 0.5 play 0.5" in out and "config.data.on_change = 'continue'" in out
    out = run("train", *changed, "--config.data.on_change=continue")
    assert "data: a new order from batch 3 on" in out and "step 12/12" in out


def test_the_data_end_when_they_are_declared_to(corpus, tmp_path):
    """Fewer steps than asked for: the last batch holds what is left, and the run ends there, with an evaluation."""
    options = {"data.train": str(corpus / "a.jsonl"), "data.epochs": 1, "train.steps": 1000, "data.eval": str(corpus / "b.txt")}
    out = run("train", *keys(corpus, tmp_path, **options))
    rows = read_rows(tmp_path / "metrics.jsonl")
    last = rows[-1]["step"]
    assert f"config.data.epochs = 1 ends it at step {last}" in out and f"finished at step {last}" in out
    assert rows[-1]["eval_loss"] > 0
    config = load_config(str(tmp_path / "config.json"))
    tokens = sum(len(json.loads(line)["text"]) + 1 for line in (corpus / "a.jsonl").read_text().splitlines())

    def targets():
        rows = read_rows(tmp_path / "metrics.jsonl")
        return round(sum(row["target_share"] for row in rows if "loss" in row) * 8 * config.data.sequence_length)

    assert targets() == tokens
    assert "its data ended at step" in run("train", *keys(corpus, tmp_path, **options))
    out = run("train", *keys(corpus, tmp_path, **options | {"data.epochs": 2}))
    assert f"data: its end left batch {last} partly empty" in out and targets() == 2 * tokens, "the next epoch, whole"
