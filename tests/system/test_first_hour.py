"""The README's first hour, step by step, with fewer steps of training."""

import json
import re

import pytest

from jaxlm.logs import read_rows
from tests.system.commands import ROOT, run

FEW = ("--config.train.steps=4", "--config.train.log_every=2", "--config.train.eval_steps=2", "--config.optimizer.warmup_steps=1")
MESH = ("--simulate_devices=8", "--config.mesh.fsdp=4", "--config.mesh.tensor=2")


@pytest.fixture(scope="module")
def hour(tmp_path_factory):
    """A folder with notes and the README's own configuration file, and in it the run of that file."""
    folder = tmp_path_factory.mktemp("hour")
    (folder / "notes").mkdir()
    for i in range(3):
        (folder / "notes" / f"{i}.txt").write_text(f"Note {i}. " + "The quick brown fox jumps over the lazy dog. " * 100)
    mine = re.search(r"```python\n# mine.py\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    (folder / "mine.py").write_text(mine)
    run("train", "--config=mine.py", "--workdir=runs/mine", *FEW, cwd=folder)
    return folder


def loss(folder):
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def test_the_packaged_text_trains_and_says_what_it_does_first(tmp_path):
    out = run("train", "--config=shakespeare", "--workdir=runs/first", *FEW, cwd=tmp_path)
    assert out.startswith("run directory: runs/first\n")
    for words in (
        "devices: 1 x",
        "parameters, state",
        "tokens per step",
        "data: training",
        "weights: random, seed 0",
        "step 4/4",
    ):
        assert words in out
    assert out.rstrip().endswith("--workdir=runs/first")
    files = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert {"config.json", "metrics.jsonl", "tensorboard", "checkpoints", "sharding.txt"} <= files
    row = read_rows(tmp_path / "runs" / "first" / "metrics.jsonl")[0]
    assert {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "mfu"} <= row.keys()


def test_without_a_workdir_a_run_names_its_own(tmp_path):
    out = run("train", "--config=shakespeare", "--config.data.train=" + str(tmp_path / "notes.txt"), *FEW, cwd=tmp_path, status=2)
    assert "notes.txt" in out  # nothing is made for a run that cannot start
    assert not (tmp_path / "runs").exists()
    (tmp_path / "notes.txt").write_text("To be, or not to be. " * 300)
    out = run("train", "--config=shakespeare", "--config.data.train=*.txt", *FEW, cwd=tmp_path)
    assert re.match(r"run directory: runs/shakespeare-\d{8}-\d{6}\n", out)


def test_ones_own_file_trains_ones_own_text(hour):
    config = json.loads((hour / "runs/mine/config.json").read_text())
    assert config["model"]["num_layers"] == 2 and config["data"]["train"] == ["notes/*.txt"]


def test_another_mesh_gives_the_same_numbers(hour):
    out = run("train", "--config=mine.py", "--workdir=runs/mesh", *FEW, *MESH, cwd=hour)
    assert "mesh: fsdp 4 x tensor 2" in out
    assert loss(hour / "runs/mesh") == pytest.approx(loss(hour / "runs/mine"), abs=1e-5)


def test_a_new_rule_in_that_file_changes_where_arrays_lie(hour):
    lines = re.findall(r"^    config\.sharding\..*$", (ROOT / "README.md").read_text(), re.M)
    assert len(lines) == 2
    for i, (line, path, spec) in enumerate(zip(lines, ("embed/embedding", "lm_head/kernel"), (["fsdp"], [None, "tensor"]))):
        file = hour / f"rule{i}.py"
        file.write_text((hour / "mine.py").read_text().replace("    return config", f"{line}\n    return config"))
        report = json.loads(run("explain", f"--config={file}", *MESH, "--json", cwd=hour))
        (array,) = (a for a in report["arrays"] if a["kind"] == "params" and a["path"] == path)
        assert [axis for axis in array["spec"] if axis] == [axis for axis in spec if axis], array


def test_it_is_resumed_by_the_command_that_it_prints(hour):
    out = run("train", "--config=mine.py", "--workdir=runs/stopped", *FEW, "--config.train.stop_at=2", cwd=hour)
    assert len(read_rows(hour / "runs/stopped/metrics.jsonl")) == 2
    out = run("train", "--config=mine.py", "--workdir=runs/stopped", *FEW, cwd=hour)
    assert "weights: the checkpoint of step 2" in out
    assert loss(hour / "runs/stopped")[-1] == loss(hour / "runs/mine")[-1]


def test_a_run_can_be_run_again_from_its_own_configuration(hour):
    run("train", "--config=runs/mine/config.json", "--workdir=runs/again", cwd=hour)
    assert loss(hour / "runs/again") == loss(hour / "runs/mine")


def test_evaluate_says_loss_perplexity_and_bits_per_byte(hour):
    out = run("evaluate", "runs/mine", cwd=hour)
    assert all(words in out for words in ("loss", "perplexity", "bits per byte"))
    figures = json.loads(run("evaluate", "runs/mine", "--json", "--step=best", cwd=hour))
    assert figures["step"] == 4 and figures["eval_loss"] == pytest.approx(
        read_rows(hour / "runs/mine/metrics.jsonl")[-1]["eval_loss"]
    )


def test_evaluate_gives_the_same_figures_on_another_mesh(hour):
    one = json.loads(run("evaluate", "runs/mine", "--json", cwd=hour))
    many = json.loads(run("evaluate", "runs/mine", "--json", *MESH, cwd=hour))
    assert many["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-5) and many["eval_targets"] == one["eval_targets"]


def test_generate_continues_a_prompt_the_same_way_for_the_same_seed(hour):
    def text(*flags):
        return run("generate", "runs/mine", "--max_new_tokens=20", *flags, cwd=hour)

    drawn = text("--prompt=The ", "--seed=1", "--top_p=0.9", "--top_k=40")
    assert drawn.startswith("The ") and drawn == text("--prompt=The ", "--seed=1", "--top_p=0.9", "--top_k=40")
    assert drawn != text("--prompt=The ", "--seed=2", "--top_p=0.9", "--top_k=40")
    (hour / "prompt.txt").write_text("The ")
    greedy = text("--prompt=The ", "--temperature=0")
    assert greedy == text("--prompt_file=prompt.txt", "--temperature=0", "--seed=5")
    assert greedy == text("--prompt=The ", "--temperature=0", *MESH)


@pytest.mark.parametrize("name", ["shakespeare", "gpt2_124m", "llama3_8b", "llama3_70b"])
def test_every_shipped_configuration_resolves_under_explain(name):
    mesh = (
        ("--simulate_devices=512", "--config.mesh.fsdp=64", "--config.mesh.tensor=8", "--config.mesh.data=1")
        if name.startswith("llama")
        else ()
    )
    out = run("explain", f"--config={name}", *mesh)
    assert "lm_head/kernel" in out or "embed/embedding" in out


def test_help_names_every_key():
    out = run("train", "--config.help")
    assert "--config.model.rope_theta" in out and "--config.mesh.fsdp" in out
