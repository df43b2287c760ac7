"""Runs that start from a Hugging Face folder: its architecture, its weights, its tokenizer; and one answer on every mesh."""

import gc
import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from jaxlm import commandline, evaluate, generate, starting_point
from jaxlm.commandline import load_config
from jaxlm.config import to_config
from jaxlm.data import open_data, train_batches
from jaxlm.data.feed import place, rows_of
from jaxlm.job import build_job
from jaxlm.train import compile_train_step
from partitioning.declaration import DeclarationError
from tests.jaxlm.huggingface.models import FOLDERS, read
from tests.system.commands import TINY, run
from tests.system.curves import compare, is_equal


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The fixtures with a tokenizer: a letter is a token."""
    out = tmp_path_factory.mktemp("folders")
    letters = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY ,.;:'!\n")}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    for name in ("llama", "gemma3", "olmo2"):
        shutil.copytree(FOLDERS / name, out / name)
        model.save(str(out / name / "tokenizer.json"))
    return out


def settings(folder, **sections):
    values = {"model": {"from_hf": str(folder)}, "checkpoint": {"restore_from": str(folder)}, "data": {"sequence_length": 32},
              "train": {"global_batch_size": 16, "steps": 10}, "optimizer": {"learning_rate": 5e-3}}
    return to_config(values | sections)


def curve(config, count, workdir):
    """(loss, gradient norm) of each step of fine-tuning on some devices."""
    job, data = build_job(config, count).on_devices(jax.devices()[:count]), open_data(config.data, config.model.vocab_size)
    point = starting_point.find(config, workdir)
    assert "parameters alone" in starting_point.check(point, job, data, False)
    state, step, shardings = starting_point.load(point, job), compile_train_step(job), job.batch_shardings()
    size, rows = config.train.global_batch_size, []
    batches = train_batches(data.mixture(size, 0), rows=rows_of(shardings["inputs"], size))
    with place(batches, shardings) as feed:
        for _ in range(config.train.steps):
            state, metrics = step(state, next(feed))
            rows.append((metrics["loss"], metrics["grad_norm"]))
            jax.block_until_ready(state)
    return np.array(jax.device_get(rows), np.float64).T


@pytest.mark.parametrize("name, mesh", [("gemma3", dict(data=2, pipe=2, fsdp=2)), ("olmo2", dict(fsdp=4, tensor=2))])
def test_fine_tuning_on_a_mesh_is_that_on_one_device(name, mesh, folders, tmp_path):
    one = curve(settings(folders / name), 1, tmp_path)
    many = settings(folders / name, mesh=mesh, pipeline={"num_microbatches": 4}, sharding={"pad": ("vocab",)})
    many = curve(many, 8, tmp_path)
    assert one[0][0] - one[0][-1] > 0.3 and is_equal(compare(many, one)), compare(many, one)


def test_a_run_from_a_folder_has_its_architecture_weights_and_tokenizer(folders, tmp_path, capsys):
    folder, work = folders / "llama", tmp_path / "work"
    said = run("train", f"--config={TINY}", f"--config.model.from_hf={folder}", f"--config.checkpoint.restore_from={folder}",
               "--config.train.steps=1", "--config.optimizer.learning_rate=0",
               "--config.optimizer.warmup_steps=0", "--config.train.eval_steps=1", f"--workdir={work}")
    assert f"weights: {folder} (llama of Hugging Face) (12 arrays: parameters alone)" in said
    config = load_config(str(work / "config.json"))
    assert config.model == to_config({"model": {"from_hf": str(folder)}}).model and config.model.from_hf is None
    assert config.data.tokenizer == str(folder)
    scored = {}
    for source in (folder, work):
        words = [str(source), "--json", "--config.train.eval_steps=1", "--config.data.sequence_length=32",
                 "--config.train.global_batch_size=8", "--config.data.eval_fraction=0.1"]
        assert commandline.run(evaluate.main, evaluate.arguments(), words) == 0
        scored[source] = json.loads(capsys.readouterr().out)
    assert scored[folder]["step"] is None and scored[work]["step"] == 1
    assert scored[folder]["eval_loss"] == pytest.approx(scored[work]["eval_loss"], rel=1e-6)
    assert commandline.run(generate.main, generate.arguments(),
                           [str(folder), "--prompt", "To be", "--temperature", "0", "--max_new_tokens", "3"]) == 0
    model, params, _ = read(folder)
    ids = open_data(config.data, 61).tokenizer.encode("To be")
    first = int(np.argmax(model.logits(params, np.array([ids], np.int32))[0, -1]))
    assert capsys.readouterr().out[5] == open_data(config.data, 61).tokenizer.decode([first])


def test_a_folder_answers_a_user_by_its_own_chat_template(folders, tmp_path, capsys):
    pytest.importorskip("jinja2")
    folder = shutil.copytree(folders / "llama", tmp_path / "chat")
    words = [str(folder), "--chat", "--prompt", "be", "--temperature", "0", "--max_new_tokens", "3"]
    assert commandline.run(generate.main, generate.arguments(), words) == 2
    assert "brings no chat template" in capsys.readouterr().err
    template = "{% for m in messages %}To {{ m.content }}, {% endfor %}{% if add_generation_prompt %}or {% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert commandline.run(generate.main, generate.arguments(), words) == 0
    answer = capsys.readouterr().out
    words = [str(folder), "--prompt", "To be, or ", "--temperature", "0", "--max_new_tokens", "3"]
    assert commandline.run(generate.main, generate.arguments(), words) == 0
    assert capsys.readouterr().out == "To be, or " + answer


def test_fine_tuning_on_conversations_learns_what_the_folder_s_template_writes(folders, tmp_path):
    pytest.importorskip("jinja2")
    folder = shutil.copytree(folders / "llama", tmp_path / "chat")
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}!{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    talk = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 40)
    config = settings(folder, data={"train": (str(tmp_path / "talk.jsonl"),), "content": "chat", "pack": "best_fit",
                                    "sequence_length": 32, "eval_fraction": 0.0})
    losses, _ = curve(config, 1, tmp_path / "work")
    assert losses[0] - losses[-1] > 0.3


def test_what_differs_from_the_folder_is_said_or_refused(folders, tmp_path):
    def checked(**sections):
        config = settings(folders / "llama", **sections)
        job = build_job(config, 1)
        point = starting_point.find(config, tmp_path)
        return starting_point.check(point, job.on_devices(jax.devices()[:1]), None, False)

    source = str(folders / "llama")
    assert "otherwise than its config.json: config.model.rope_theta: 500.0 -> 9.0" in checked(
        model={"from_hf": source, "rope_theta": 9.0})
    with pytest.raises(DeclarationError, match=r"is of another model:(.|\n)*config.model.mlp_dim: 20 -> 24"):
        checked(model={"from_hf": source, "mlp_dim": 24})
    with pytest.raises(DeclarationError, match="is a Hugging Face folder, which has weights alone; set restore = 'params'"):
        checked(checkpoint={"restore_from": source, "restore": "all"})
    words = checked(model={"from_hf": source, "vocab_size": 64}, checkpoint={"restore_from": source, "include": ("layers/.*",)})
    assert "(9 arrays: parameters alone); " in words and "at random, seed 0: embed/embedding" in words


def test_a_folder_stands_over_the_file_and_under_the_command_line(folders):
    source = str(folders / "llama")
    config = load_config("shakespeare", [("model.rope_theta", "7.0"), ("data.sequence_length", "16"), ("model.from_hf", source)])
    assert (config.model.embed_dim, config.model.qk_norm, config.model.rope_theta) == (16, False, 7.0)
    assert config.data.tokenizer == source and config.optimizer.name == "muon"
    assert load_config(source).model == settings(folders / "llama").model
    other = load_config(source, [("data.tokenizer", "bytes")])
    assert other.data.tokenizer == "bytes" and other.data.sequence_length == 64          # as long as the model's longest
    with pytest.raises(DeclarationError, match="config.model.from_hf = 'nowhere' is no folder"):
        load_config("shakespeare", [("model.from_hf", "nowhere")])


def test_loading_leaves_no_random_parameters_beside_those_that_are_read(folders, tmp_path, monkeypatch):
    config = settings(folders / "llama")
    job = build_job(config, 1).on_devices(jax.devices()[:1])
    point, seen = starting_point.find(config, tmp_path), []

    def tables():
        gc.collect()
        return sum(x.shape == (61, 16) for x in jax.live_arrays())

    read_all = type(point.weights).restore
    monkeypatch.setattr(type(point.weights), "restore", lambda self, *rest: seen.append(tables()) or read_all(self, *rest))
    before = tables()
    state = starting_point.load(point, job)
    assert seen[0] - before == 2                                       # the embedding's two moments alone
    assert state["params"]["embed"]["embedding"].shape == (61, 16)
