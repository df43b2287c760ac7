"""What a person gets wrong: one message that says what was found, what was expected and what to do; status 2; nothing is compiled
and nothing is made or harmed."""

import importlib.util
import json
import shutil

import jax
import pytest

from jaxlm import commandline, evaluate, explain, generate, train
from jaxlm.run_directory import sole_writer
from tests.system.commands import TINY, run

NO_WANDB = pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="the wandb package is installed")
COMMANDS = dict(train=train, evaluate=evaluate, generate=generate, explain=explain)


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs a command in this process; returns its message. Fails if anything is compiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled before refusing"))

    def refuse(command, *arguments):
        module = COMMANDS[command]
        status = commandline.run(module.main, module.arguments(), [*map(str, arguments)])
        message = capsys.readouterr().err
        assert status == 2, f"exit status {status}: {message}"
        return message

    return refuse


def tiny(*more):
    """Arguments of a training command that would otherwise run, on the eight devices of the tests."""
    return (f"--config={TINY}", "--workdir=run", *more)


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--config.train.stpes=5", ["config.train.stpes", "did you mean 'config.train.steps'"]),
        ("--config.train.steps=soon", ["config.train.steps", "'soon'", "int"]),
        ("--config.train.steps=-1", ["config.train.steps = -1", "at least 1"]),
        ("--config.data.train=nowhere.txt", ["nowhere.txt"]),
        ("--config.data.train=nowhere/*.txt", ["nowhere/*.txt"]),
        ("--config.data.tokenizer=nowhere.json", ["nowhere.json"]),
        ("--config.model.vocab_size=200", ["257", "config.model.vocab_size = 200"]),
        ("--config.data.sequence_length=1000000", ["1000000", "max_positions"]),
        ("--config.mesh.fsdp=3", ["fsdp", "3", "8"]),
        ("--config.mesh.tensor=8", ["kv_heads", "2", "tensor=8"]),
        ("--config.mesh.tensor=4", ["kv_heads has size 2", "tensor=4", "kv_heads = None", "sharding.pad = ('kv_heads',)"]),
        ("--config.sharding.pad=embed", ["config.sharding.pad", "'embed'", "vocab, heads, kv_heads, mlp"]),
        ("--config.mesh.pipe=8", ["config.model.num_layers = 4", "mesh.pipe = 8", "num_layers = 8"]),
        ("--config.mesh.expert=2", ["expert"]),
        ("--config.sharding.rules.haeds=tensor", ["haeds", "heads"]),
        ("--config.sharding.rules.mlp=tensr", ["tensr", "tensor"]),
        ("--config.train.global_batch_size=4", ["batch", "config.train.global_batch_size = 8"]),
        ("--config.optimizer.decay_mask=kernels", ["decay_mask", "kernels"]),
        ("--config.kernels.attention=flash", ["flash", "reference"]),
        ("--config.train.remat=atention", ["remat", "'attention'"]),
        ("--config.model.rope_scaling.kind=yarn", ["rope_scaling", "yarn", "llama3"]),
        ("--config.checkpoint.restore_from=nowhere", ["nowhere"]),
        pytest.param("--config.log.wandb=project", ["wandb", "pip install"], marks=NO_WANDB),
        ("--config.log.profile_steps=12,10", ["profile_steps"]),
        ("--config.model.window_pattern=()", ["window_pattern"]),
        ("--config.optimizer.clip_norm=1e400", ["clip_norm", "finite"]),
        ("--config.train.seed=99999999999", ["seed", "at most"]),
        ("--config.sharding.overrides=(('(?i)LM_HEAD/kernel',(None,None)),)", ["(?i)LM_HEAD", "regular expression"]),
        ("--workdir=/proc/x", ["--workdir=/proc/x", "cannot be made"]),
        ("--config.log.wandb=project", ["wandb", "pip install"]),
        ("--config.log.profile_steps=12,10", ["profile_steps"]),
        ("--workdir=/proc/x", ["--workdir=/proc/x", "cannot be made"]),
    ],
)
def test_a_wrong_value_is_answered_before_anything_compiles(flag, words, refused, tmp_path):
    message = refused("train", *tiny(flag))
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


def test_an_empty_data_file_is_named(refused, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt" in refused("train", *tiny("--config.data.train=empty.txt"))


def test_a_text_shorter_than_a_sequence_is_named_with_the_numbers(refused, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    message = refused("train", *tiny("--config.data.train=short.txt"))
    assert "32" in message and "sequence_length" in message


def test_a_missing_configuration_lists_the_shipped_ones(refused):
    assert "shakespeare" in refused("train")
    assert "did you mean 'shakespeare'" in refused("train", "--config=shakespere")
    assert "shakespeare" in refused("explain")


def test_a_section_or_a_value_in_its_place_is_explained(refused):
    assert "config.train is a section" in refused("train", *tiny("--config.train=5"))
    assert "has no value" in refused("train", *tiny("--config.train.steps"))


def test_a_workdir_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "run").write_text("mine")
    assert "is a file" in refused("train", *tiny())
    assert (tmp_path / "run").read_text() == "mine"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run("train", f"--config={TINY}", f"--workdir={folder}/run", "--config.train.steps=2", "--config.optimizer.warmup_steps=1")
    return folder / "run"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--config.model.num_layers=2"], ["another model", "config.model.num_layers: 4 -> 2"]),
        (["--config.optimizer.learning_rate=0.5"], ["learning_rate: 0.002 -> 0.5", "--allow_change"]),
        (["--config.model.mlp_dim=128", "--allow_change"], ["another model", "mlp_dim"]),
    ],
)
def test_a_run_directory_of_another_run_is_refused_and_left_as_it_is(flags, words, refused, finished):
    before = contents(finished)
    message = refused("train", f"--config={TINY}", f"--workdir={finished}", *flags)
    assert all(word in message for word in words), message
    assert contents(finished) == before


def test_parameters_of_another_model_are_refused_with_the_keys_that_differ(refused, finished, tmp_path):
    message = refused("train", *tiny(f"--config.checkpoint.restore_from={finished}", "--config.model.num_layers=2"))
    assert "is of another model" in message and "config.model.num_layers: 4 -> 2" in message
    assert not (tmp_path / "run").exists()


def test_a_wrong_sample_prompt_is_refused_before_training(refused):
    assert "config.train.sample_prompt has 0 tokens" in refused(
        "train", *tiny("--config.train.sample_every=5", "--config.train.sample_prompt=")
    )


def test_a_step_that_is_no_number_and_a_row_cut_short_are_no_traceback(refused, finished, tmp_path):
    assert "--step=" in refused("evaluate", finished, "--step=\u00b2")
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "eval_lo')
    assert json.loads(run("evaluate", copy, "--step=best", "--json"))["step"] == 2


def test_a_second_run_is_kept_out_of_a_run_directory(refused, finished):
    with sole_writer(finished):
        message = refused(
            "train", f"--config={TINY}", f"--workdir={finished}", "--config.train.steps=4", "--config.optimizer.warmup_steps=1"
        )
    assert "another run is writing" in message


def test_a_run_directory_without_its_configuration_is_refused(refused, finished, tmp_path):
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    assert "no config.json" in refused("train", *tiny())


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_a_source_that_is_no_run_is_named(command, refused, finished):
    prompt = ["--prompt=x"] if command == "generate" else []
    assert "is no run directory" in refused(command, "nowhere", *prompt)
    assert "expected latest, best or one of the saved steps: 2" in refused(command, finished, "--step=7", *prompt)
    assert "holds: 2" in refused(command, finished / "checkpoints" / "7", *prompt)


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--temperature=-1", "temperature"),
        ("--top_k=0", "top_k"),
        ("--top_p=1.5", "top_p"),
        ("--max_new_tokens=0", "max_new_tokens"),
        ("--prompt=", "empty"),
        ("--prompt_file=nowhere.txt", "nowhere.txt"),
        ("--seed=99999999999999999999999", "seed"),
    ],
)
def test_a_wrong_sampling_flag_is_explained(flag, words, refused, finished):
    assert words in refused("generate", finished, *([flag] if "prompt" in flag else [flag, "--prompt=x"]))


def test_a_checkpoint_that_cannot_be_read_is_never_a_fresh_start(finished, tmp_path):
    """The only checkpoint is damaged: status 1, no new training, nothing overwritten."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    for path in (copy / "checkpoints" / "2" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    before = contents(copy)
    out = run(
        "train", f"--config={TINY}", f"--workdir={copy}", "--config.train.steps=4", "--config.optimizer.warmup_steps=1", status=1
    )
    assert "holds 2, but none of them is whole. Nothing was touched" in out and " has 0 bytes, not " in out
    assert "step 3" not in out
    assert contents(copy) == before


def test_a_process_ends_with_status_2_and_no_traceback(tmp_path):
    out = run("train", f"--config={TINY}", "--config.train.stpes=5", cwd=tmp_path, status=2)
    assert out.count("\n") == 1 and json.dumps(out)
