"""The configuration: what is wrong is fatal and named, what is right is read as the declared type."""

import dataclasses
import json
import pathlib

import pytest

from jaxlm import commandline
from jaxlm.errors import RunError, Stopped
from jaxlm.config import Config, default_config, to_config, to_dict
from jaxlm.run_directory import check_name, check_resume, differences, load_saved_config, save_config
from partitioning.declaration import DeclarationError, keys


def with_(**leaves):
    """The defaults with dotted keys replaced, as a config file would."""
    config = default_config()
    for key, value in leaves.items():
        section, name = key.split("__")
        config[section][name] = value
    return to_config(config)


def override(key, text, source="shakespeare"):
    return commandline.load_config(source, [(key, text)])


def test_the_defaults_survive_the_way_through_a_configdict():
    assert to_config(default_config()) == Config()


def test_every_key_has_a_meaning_of_one_line():
    listed = list(keys(Config))
    assert len(listed) > 60
    assert all(key.meaning and "\n" not in key.meaning for key in listed)
    assert all(key.name in commandline.config_help(Config()) for key in listed)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("train__stpes", 5, ["config.train.stpes", "did you mean 'config.train.steps'"]),
        ("mesh__fsdp", "4", ["config.mesh.fsdp", "'4'", "str", "int"]),
        ("train__steps", 2.5, ["config.train.steps", "2.5", "int"]),
        ("train__steps", 0, ["config.train.steps", "0", "at least 1"]),
        ("model__dropout", 1.0, ["config.model.dropout", "below 1"]),
        ("model__norm", "layernrom", ["config.model.norm", "layernrom", "'layernorm'"]),
        ("model__num_kv_heads", 3, ["num_kv_heads = 3", "num_heads = 4", "1, 2, 4"]),
        ("train__gradient_accumulation", 3, ["global_batch_size = 16", "gradient_accumulation = 3"]),
        ("data__sequence_length", 4096, ["sequence_length = 4096", "max_positions = 2048"]),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_the_way_out(key, value, words):
    with pytest.raises(DeclarationError) as error:
        with_(**{key: value})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "key, text, expected",
    [
        ("train.steps", "1e3", 1000),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", "1", 1.0),
        ("model.tie_embeddings", "true", True),
        ("model.head_dim", "None", None),
        ("model.window_pattern", "None,64", (None, 64)),
        ("train.remat", "full", ("full",)),
        ("data.train", "a.txt,b.txt", ("a.txt", "b.txt")),
        ("data.train", "notes/*.txt", ("notes/*.txt",)),
        ("sharding.zero_axes", "('data', 'fsdp')", ("data", "fsdp")),
        ("sharding.rules", "{'heads': None}", {"heads": None}),
        ("sharding.rules", "dict(heads=None)", {"heads": None}),
        ("data.train", "(dict(paths='a,b', weight=1), dict(paths=('c',)))", ({"paths": "a,b", "weight": 1}, {"paths": ("c",)})),
        ("data.train", "dict(paths='a,b')", ({"paths": "a,b"},)),
        ("data.stages", "((7, dict(a=0.5, b=0.5)),)", ((7, {"a": 0.5, "b": 0.5}),)),
        ("train.sample_prompt", "12", "12"),
        ("optimizer.clip_norm", "None", None),
    ],
)
def test_the_command_line_reads_values_by_their_declared_type(key, text, expected):
    section, name = key.split(".")
    value = getattr(getattr(override(key, text), section), name)
    assert value == expected and type(value) is type(expected)


def test_an_entry_of_a_dict_can_be_set_alone():
    rules = override("sharding.rules.heads", "tensor").sharding.rules
    assert rules["heads"] == "tensor"
    assert override("model.rope_scaling.factor", "8").model.rope_scaling == {"factor": 8}


@pytest.mark.parametrize(
    "key, text",
    [
        ("train.steps", "many"),
        ("model.bias", "1"),
        ("trian.steps", "3"),
        ("train", "3"),
        ("train.steps.more", "3"),
        ("model.window_pattern", "a,b"),
    ],
)
def test_a_wrong_override_is_refused(key, text):
    with pytest.raises(DeclarationError, match=r"config\.tr|config\.model"):
        override(key, text)


def test_a_dict_assigned_to_a_section_merges_over_its_defaults():
    config = default_config()
    config.mesh = dict(fsdp=4)
    assert to_config(config).mesh == dataclasses.replace(Config().mesh, fsdp=4)


def test_a_config_file_that_fails_is_shown_with_its_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxlm.config import default_config\ndef get_config():\n    config = default_config()\n"
        "    config.trian.steps = 3\n    return config\n"
    )
    with pytest.raises(DeclarationError, match=r"mine\.py:4"):
        commandline.load_config(str(file))
    file.write_text("x = 1\n")
    with pytest.raises(DeclarationError, match="get_config"):
        commandline.load_config(str(file))


def test_an_unknown_configuration_names_the_nearest_shipped_one():
    with pytest.raises(DeclarationError, match="did you mean 'shakespeare'"):
        commandline.load_config("shakespaere")


def test_the_saved_configuration_can_be_run_again(tmp_path):
    config = override("model.window_pattern", "None,64")
    save_config(tmp_path, config)
    assert load_saved_config(tmp_path) == config
    assert commandline.load_config(str(tmp_path / "config.json")) == config


def test_a_damaged_saved_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DeclarationError, match=r"config\.json"):
        load_saved_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model": {"num_layer": 3}}))
    with pytest.raises(DeclarationError, match="num_layers"):
        load_saved_config(tmp_path)


def test_a_resume_may_change_the_mesh_but_not_the_model(tmp_path):
    old = Config()
    assert check_resume(tmp_path, old, with_(mesh__fsdp=2, train__steps=7, train__log_every=3), False)
    with pytest.raises(DeclarationError, match=r"another model:\n  config.model.num_layers: 4 -> 2"):
        check_resume(tmp_path, old, with_(model__num_layers=2), True)
    with pytest.raises(DeclarationError, match=r"learning_rate: 0.001 -> 0.5(.|\n)*--allow_change"):
        check_resume(tmp_path, old, with_(optimizer__learning_rate=0.5), False)
    with pytest.raises(DeclarationError, match="config.data.on_change='continue' goes on"):
        check_resume(tmp_path, old, with_(data__sequence_length=8), False)
    assert check_resume(tmp_path, old, with_(optimizer__learning_rate=0.5), True) == [
        "config.optimizer.learning_rate: 0.001 -> 0.5"
    ]


def test_a_changed_entry_of_a_dict_is_a_difference():
    assert [key for key, *_ in differences(Config(), with_(sharding__rules={"heads": None}))] == ["sharding.rules"]
    assert not differences(Config(), to_config(to_dict(Config())))


def test_a_key_in_the_wrong_place_is_found():
    with pytest.raises(DeclarationError, match=r"did you mean config\.optimizer\.learning_rate\?"):
        override("learning_rate", "1")


def test_a_misspelt_flag_and_an_unquoted_pattern_are_explained(capsys):
    arguments = commandline.parser("jaxlm.train", "Trains.")
    assert commandline.run(lambda flags: 0, arguments, ["--simulate_device=8"]) == 2
    assert "did you mean '--simulate_devices'" in capsys.readouterr().err
    assert commandline.run(lambda flags: 0, arguments, ["b.txt"]) == 2
    assert "quote the pattern" in capsys.readouterr().err


def test_a_configuration_file_that_exits_is_a_mistake_and_no_end(tmp_path):
    (tmp_path / "mine.py").write_text("import sys\n\nsys.exit(0)\n")
    with pytest.raises(DeclarationError, match=r"mine\.py:3 failed: SystemExit: 0"):
        commandline.load_config(str(tmp_path / "mine.py"))


def test_a_configuration_without_its_suffix_is_recognised(tmp_path):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DeclarationError, match=r"did you mean --config=.*mine\.py"):
        commandline.load_config(str(tmp_path / "mine"))
    with pytest.raises(DeclarationError, match=r"did you mean --config=.*config\.json"):
        commandline.load_config(str(tmp_path))


def test_help_lists_commands_flags_and_configurations(capsys):
    with pytest.raises(SystemExit) as stop:
        commandline.run(lambda flags: 0, commandline.parser("jaxlm.train", "Trains."), ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(word in text for word in ("jaxlm.generate", "--simulate_devices", "shakespeare"))


@pytest.mark.parametrize(
    "raised, status",
    [
        (DeclarationError("x"), 2),
        (RunError("x"), 1),
        (Stopped("x"), 3),
        (OSError(28, "No space left on device"), 1),
        (None, 0),
    ],
)
def test_each_kind_of_end_has_its_exit_status(raised, status, capsys):
    def main(flags):
        if raised:
            raise raised

    assert commandline.run(main, commandline.parser("jaxlm.train", "Trains."), []) == status
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lr[0.001]", "w*", "w?d/run", "back\\s"])
def test_a_run_directory_in_which_no_checkpoint_could_be_put_together_is_refused(name):
    with pytest.raises(DeclarationError, match="checkpoints cannot be written below a path with"):
        check_name(pathlib.Path(name))
    check_name(pathlib.Path("läuf {e} #1, it's 50%/run"))
