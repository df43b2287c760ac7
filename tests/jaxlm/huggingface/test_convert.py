"""`python -m jaxlm.convert`: in and out again without losing a bit, and what is carried along."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlm import commandline, convert
from jaxlm.checkpoints import Checkpoints
from jaxlm.huggingface.folder import Tensors
from tests.jaxlm.huggingface.models import FOLDERS, NAMES


def run(*words, status=0):
    assert commandline.run(convert.main, convert.arguments(), [str(word) for word in words]) == status


def tensors(folder):
    found = Tensors(folder)
    return {name: np.array(found.array(name)) for name in found.entries}


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_in_comes_out_bit_for_bit(name, tmp_path):
    source = shutil.copytree(FOLDERS / name, tmp_path / "source")
    (source / "reference.safetensors").unlink()
    for file in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "LICENSE"):
        (source / file).write_text(f"{{\"of\": \"{file}\"}}")
    axes = ["--config.mesh.fsdp=4", "--config.mesh.tensor=2"] if name in ("gemma2", "gemma3") else []
    run("from-hf", source, tmp_path / "run", *axes, *(["--config.sharding.pad=vocab"] if axes else []))
    run("to-hf", tmp_path / "run", tmp_path / "out")
    ours, theirs = tensors(tmp_path / "out"), tensors(source)
    assert ours.keys() == theirs.keys()
    for key, x in theirs.items():
        assert ours[key].dtype == x.dtype and np.array_equal(ours[key], x), key
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == theirs.keys()       # the library reads it, too
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for file in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "out" / file).read_text() == (source / file).read_text()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"]["tokenizer"] == str(tmp_path / "run" / "huggingface")


def test_dtypes_of_the_checkpoint_and_of_the_files(tmp_path, capsys):
    run("from-hf", FOLDERS / "llama", tmp_path / "run", "--dtype=bfloat16")
    shapes = Checkpoints(tmp_path / "run" / "checkpoints").shapes(0)
    assert {dtype for _, dtype in shapes.values()} == {"bfloat16"}
    run("to-hf", tmp_path / "run", tmp_path / "half")
    run("to-hf", tmp_path / "run", tmp_path / "whole", "--dtype=float32", "--family=llama")
    original, half, whole = tensors(FOLDERS / "llama"), tensors(tmp_path / "half"), tensors(tmp_path / "whole")
    for key, x in original.items():
        rounded = x.astype(ml_dtypes.bfloat16)
        assert half[key].dtype == rounded.dtype and np.array_equal(half[key], rounded)
        assert whole[key].dtype == np.float32 and np.array_equal(whole[key], rounded.astype(np.float32))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_run_that_came_from_a_folder_goes_out_as_it_came(tmp_path):
    """Training's own run directory carries no files; its tokenizer says which folder they are in."""
    source = shutil.copytree(FOLDERS / "phi3", tmp_path / "source")
    (source / "reference.safetensors").unlink()
    (source / "tokenizer.json").write_text("{}")
    run("from-hf", source, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "huggingface")
    place = tmp_path / "run" / "config.json"
    config = json.loads(place.read_text())
    for tokenizer, kind in ((str(source), "phi3"), ("bytes", "mistral")):
        place.write_text(json.dumps(config | {"data": config["data"] | {"tokenizer": tokenizer}}))
        run("to-hf", tmp_path / "run", tmp_path / kind)
        assert json.loads((tmp_path / kind / "config.json").read_text())["model_type"] == kind
        assert (tmp_path / kind / "tokenizer.json").exists() == (kind == "phi3")
    assert json.loads((tmp_path / "mistral" / "config.json").read_text())["eos_token_id"] == 256, "the tokenizer's own"
    assert json.loads((tmp_path / "phi3" / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_a_dtype_that_would_be_lost_is_refused(tmp_path, capsys):
    source = shutil.copytree(FOLDERS / "mistral", tmp_path / "source")
    file = source / "model.safetensors"
    original = load_file(file)
    for change, message in ((lambda name: np.float64, "are float64"),
                            (lambda name: np.float16 if ".0." in name else np.float32, "are float16 and float32")):
        save_file({name: x.astype(change(name)) for name, x in original.items()}, file, {"format": "pt"})
        run("from-hf", source, tmp_path / "run", status=2)
        assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
    run("from-hf", source, tmp_path / "run", "--dtype=float32")
    (tmp_path / "other" / "huggingface").mkdir(parents=True)
    run("from-hf", source, tmp_path / "other", "--dtype=float32", status=2)
    assert "is there already" in capsys.readouterr().err


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path, capsys):
    source = shutil.copytree(FOLDERS / "mistral", tmp_path / "source")
    original = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    original[name] = original[name].astype(np.float32)
    original[name][0, 0] = 1e6
    save_file(original, source / "model.safetensors", {"format": "pt"})
    run("from-hf", source, tmp_path / "half", "--dtype=float16", status=2)
    assert "float16 does not hold" in capsys.readouterr().err and not (tmp_path / "half" / "checkpoints").exists()
    run("from-hf", source, tmp_path / "run")
    run("to-hf", tmp_path / "run", tmp_path / "out", "--dtype=float16", status=2)
    assert f"{name} has numbers that float16 does not hold" in capsys.readouterr().err


def test_mistakes_are_told(tmp_path, capsys):
    run("from-hf", FOLDERS / "llama", tmp_path / "run")
    for words, message in (
            (("from-hf", FOLDERS / "llama", tmp_path / "run"), "is a run directory already"),
            (("from-hf", tmp_path / "none", tmp_path / "other"), "is no folder of a Hugging Face model"),
            (("to-hf", tmp_path / "run", FOLDERS), "is there already"),
            (("to-hf", tmp_path / "run", tmp_path / "out", "--family=gpt3"), "did you mean 'gpt2'"),
            (("to-hf", tmp_path / "run", tmp_path / "out", "--family=gemma2"), "a model of the family gemma2 cannot be"),
            (("from-hf", FOLDERS / "llama", tmp_path / "run" / "config.json" / "x"), "cannot be made"),
            (("to-hf", tmp_path / "run", tmp_path / "run" / "config.json" / "x"), "cannot be made"),
            (("to-hf", FOLDERS / "llama", tmp_path / "out"), "is a Hugging Face folder, and no run directory")):
        run(*words, status=2)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "other").exists()
