"""`python -m jaxlm.explain` answers from shapes alone, for any number of devices."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxlm import compiled, explain
from jaxlm.commandline import load_config, shipped_configs
from jaxlm.job import build_job
from partitioning import DeclarationError
from tests.system.commands import TINY, run

ROOT = pathlib.Path(__file__).parents[2]


def explained(capsys, *overrides, config="shakespeare", devices=8, as_json=True, html=None, compile=False):
    explain.main(argparse.Namespace(config=config, overrides=list(overrides), simulate_devices=devices, json=as_json, html=html,
                                    compile=compile, target=None, schedule=False))
    shown = capsys.readouterr().out
    return json.loads(shown) if as_json else shown


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "jaxlm.explain", *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_configuration_resolves_on_eight_devices(name, capsys):
    report = explained(capsys, config=name)
    specs = {(row["kind"], row["path"]): row["spec"] for row in report["arrays"]}
    assert ("params", "layers/mlp/up/kernel") in specs and ("activations", "logits") in specs
    assert report["totals"]["params"]["bytes"] == sum(row["bytes"] for row in report["arrays"] if row["kind"] == "params")


def test_llama3_70b_is_split_over_all_of_512_devices(capsys):
    totals = explained(capsys, config="llama3_70b", devices=512)["totals"]
    for kind in ("params", "gradients", "optimizer"):
        assert totals[kind]["bytes_per_device"] < totals[kind]["bytes"] / 512 * 1.001
    assert totals["params"]["bytes"] == 70_553_706_496 * 4


def test_the_report_is_of_the_layout_that_training_uses(capsys):
    overrides = (("mesh.tensor", "2"), ("sharding.zero", "1"), ("mesh.fsdp", "2"))
    layout = build_job(load_config("shakespeare", overrides), 8).layout
    report = explained(capsys, *overrides)
    assert report["mesh"] == dict(layout.sizes) and len(report["arrays"]) == len(layout.rows)
    assert [row["rule"] for row in report["arrays"]] == [row.rule for row in layout.rows]


def test_the_command_prints_text_and_starts_no_devices():
    done = command("--config=shakespeare", "--simulate_devices=4096", "--config.train.global_batch_size=4096")
    assert done.returncode == 0 and done.stdout.startswith("4096 devices: data=4096\n"), done.stderr
    assert "ZeRO 3 over fsdp shards nothing" in done.stdout


def test_html_writes_a_page_beside_the_report(tmp_path, capsys):
    report = explained(capsys, ("mesh.fsdp", "64"), ("mesh.tensor", "8"), config="llama3_70b", devices=512,
                       html=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<title>Sharding of llama3_70b</title>" in page and len(page.encode()) < 1_000_000
    assert all(f">{row['path']}</a>" in page for row in report["arrays"])


def test_text_of_a_large_model_is_readable_on_200_columns(capsys):
    shown = explained(capsys, ("mesh.fsdp", "64"), ("mesh.tensor", "8"), config="llama3_70b", devices=512, as_json=False)
    assert max(map(len, shown.partition("\nnotes\n")[0].splitlines())) <= 200


def test_a_page_that_cannot_be_written_is_said_first(tmp_path, capsys):
    for name in (tmp_path, tmp_path / "missing" / "page.html"):
        with pytest.raises(DeclarationError, match="--html="):
            explained(capsys, html=str(name))


SMALL = (("model.num_layers", "2"), ("model.embed_dim", "32"), ("model.mlp_dim", "64"), ("data.sequence_length", "32"))


def test_compile_adds_the_collectives_and_the_memory_of_the_step(tmp_path, capsys):
    explain.main(argparse.Namespace(config="shakespeare", overrides=[*SMALL, ("mesh.fsdp", "8")], simulate_devices=8, json=True,
                                    html=str(tmp_path / "page.html"), compile=True, target=None, schedule=False))
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    gathers = [row for row in report["collectives"] if row["kind"] == "all-gather"]
    assert gathers and all(row["axes"] == ["fsdp"] for row in gathers)
    memory = report["memory"]
    assert memory["platform"] == "cpu" and memory["capacity"] is memory["fits"] is None
    state = sum(report["totals"][kind]["bytes_per_device"] for kind in ("params", "optimizer"))
    assert state < memory["state"] < state + 10_000 and memory["temporary"] > 0
    assert "warning: compiled for the CPU" in shown.err and "--target=" in shown.err
    assert "Collectives of one training step" in (tmp_path / "page.html").read_text("utf-8")


def test_what_needs_less_memory_is_compiled_and_said_as_it_would_be_written():
    overrides = [*SMALL, ("mesh.fsdp", "2"), ("sharding.zero", "0"), ("train.global_batch_size", "32")]
    job, said = build_job(load_config("shakespeare", overrides), 8), []
    devices = jax.devices()[:8]
    now = compiled.memory_of(compiled.compile_for(job, devices)[0], "a chip", capacity=1)
    found = compiled.with_suggestions(now, job, lambda change: build_job(load_config("shakespeare", [*overrides, *change]), 8),
                                      devices, said.append)
    known = [name for name, _ in found.suggestions]
    assert known == ["--config.train.remat=full", "--config.train.gradient_accumulation=2", "--config.sharding.zero=3",
                     "--config.mesh.data=1 --config.mesh.fsdp=8 --config.sharding.zero=3"] + known[4:]
    assert len(said) == len(known) and found.helpful and not found.fits
    best, needed = found.helpful[0]
    words = [("=".join(word.split("=")[:-1]).removeprefix("--config."), word.split("=")[-1]) for word in best.split()]
    again = build_job(load_config("shakespeare", [*overrides, *words]), 8)
    assert compiled.memory_of(compiled.compile_for(again, devices)[0], "a chip", 1).needed == needed < now.needed


def test_an_unknown_target_is_exit_2_with_those_that_are_known():
    done = command("--config=shakespeare", "--target=h2000")
    assert done.returncode == 2 and done.stderr == "error: no target 'h2000'; did you mean 'h200'?\n"


def test_an_axis_that_is_to_stay_within_a_host_is_held_to_it_before_anything_compiles():
    arguments = ("--config=llama3_8b", "--simulate_devices=64", "--config.mesh.fsdp=4", "--config.mesh.tensor=16",
                 "--target=h200", "--config.model.num_kv_heads=16", "--config.sharding.within_host=tensor")
    done = command(*arguments)
    assert done.returncode == 2 and "tensor=16 crosses hosts" in done.stderr and "1, 2, 4, 8" in done.stderr
    assert "there is no mesh axis 'tensr'" in command(*arguments[:-1], "--config.sharding.within_host=tensr").stderr


def test_the_links_of_the_axes_are_in_every_form(tmp_path, capsys):
    overrides = (("mesh.fsdp", "4"), ("mesh.tensor", "2"))
    report = explained(capsys, *overrides, html=str(tmp_path / "page.html"))
    assert report["links"] == dict.fromkeys(("fsdp", "tensor"), "simulated devices of one process")
    assert "tensor  simulated devices of one process" in explained(capsys, *overrides, as_json=False)
    assert "simulated devices of one process" in (tmp_path / "page.html").read_text("utf-8")


def test_where_the_compiler_for_gpus_is_installed_and_no_gpu_no_command_tries_to_start_one(tmp_path):
    """(With the `compile` extra; without it there is nothing to start.)"""
    out = run("train", f"--config={TINY}", "--config.train.steps=1", "--config.optimizer.warmup_steps=0", f"--workdir={tmp_path}",
              "--config.data.eval_fraction=0", JAX_PLATFORMS="")
    assert "Traceback" not in out and "step 1/1" in out


def test_mistakes_are_exit_2_with_one_message():
    done = command("--config=shakespeare", "--simulate_devices=3")
    assert done.returncode == 2 and done.stderr.startswith("error: activation tokens: its dim batch has size") and not done.stdout
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert command().returncode == 2


def test_what_the_partitioner_gathers_for_want_of_a_way_is_noted():
    done = command(f"--config={TINY}", "--simulate_devices=4", "--compile", "--config.mesh.fsdp=2", "--config.mesh.tensor=2",
                   "--config.sharding.activations.rules.embed=tensor", "--config.model.position=learned",
                   "--config.train.global_batch_size=24", "--config.data.sequence_length=48", "--json")
    assert done.returncode == 0, done.stderr
    notes = [note for note in json.loads(done.stdout)["notes"] if "involuntary" in note]
    assert any(note.startswith("the partitioner gathers f32[264,16] whole in jit(train_step)") for note in notes), notes
    assert "Involuntary" not in done.stderr


def test_what_xla_printed_is_shown_where_compiling_fails(capfd, monkeypatch):
    def fails(job):
        os.write(2, b"the reason\n")
        raise ValueError("no")

    monkeypatch.setattr(compiled, "compile_train_step", fails)
    job = build_job(load_config("shakespeare", [("mesh.data", "1")]), 1)
    with pytest.raises(ValueError):
        compiled.compile_for(job, jax.devices()[:1])
    assert "the reason" in capfd.readouterr().err
