"""Presets: what lies over what, and mistakes in them."""

import json

import pytest

from jaxlm.commandline import load_config
from jaxlm.config import Config, default_config, to_config, to_dict
from jaxlm.presets import read_preset, shipped_presets
from partitioning.declaration import DeclarationError


def configured(source="shakespeare", *overrides):
    config = load_config(str(source), overrides)
    return config.mesh, config.sharding


@pytest.mark.parametrize("name", shipped_presets())
def test_each_shipped_one_says_when_to_use_it_and_can_be_named_on_the_command_line(name):
    assert len(shipped_presets()[name].read_text("utf-8").split('"""')[1].split()) > 10
    mesh, sharding = configured("shakespeare", ("sharding.preset", name))
    preset = read_preset(name)
    assert all(getattr(mesh, key) == value for key, value in preset["mesh"].items())
    assert all(getattr(sharding, key) == value for key, value in preset["sharding"].items())


def test_what_a_config_file_sets_lies_over_the_preset_that_it_names_dict_entries_one_by_one():
    config = default_config()
    config.sharding.preset = "megatron"
    config.mesh.tensor = 4
    config.sharding.activations = dict(rules=dict(vocab=None))
    read = to_config(config)
    assert (read.mesh.data, read.mesh.tensor, read.sharding.zero, read.sharding.zero_axes) == (-1, 4, 1, ("data",))
    assert read.sharding.activations == {"rules": {"stream_length": "tensor", "vocab": None}}
    assert config.sharding.preset == "megatron"                  # the caller's own is left as it was


FILE = """
from jaxlm.config import default_config


def get_config():
    config = default_config()
    config.mesh.fsdp = 2
    config.mesh.tensor = 2
    config.sharding.zero = 2
    config.sharding.pad = ("vocab",)
    config.sharding.within_host = ("tensor",)
    config.sharding.activations = dict(rules=dict(vocab=None))
    config.train.steps = 7
    return config
"""


@pytest.mark.parametrize("order", [1, -1])
def test_the_command_line_s_preset_lies_over_the_file_and_under_the_other_values_in_whatever_order(order, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    config = load_config(str(tmp_path / "mine.py"), (("sharding.preset", "megatron"), ("mesh.tensor", "8"))[::order])
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (-1, 1, 8)         # the preset's mesh, not the file's
    assert (config.sharding.zero, config.sharding.zero_axes, config.train.steps) == (1, ("data",), 7)
    # What the preset is silent of stays as the file has it.
    assert (config.sharding.pad, config.sharding.within_host) == (("vocab",), ("tensor",))
    assert config.sharding.activations == {"rules": {"vocab": None, "stream_length": "tensor"}}
    assert configured(tmp_path / "mine.py")[0].fsdp == 2


def test_a_preset_without_a_mesh_leaves_the_file_s(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "stage.py").write_text('sharding = dict(zero=1)\n')
    mesh, sharding = configured(tmp_path / "mine.py", ("sharding.preset", str(tmp_path / "stage.py")))
    assert (mesh.fsdp, mesh.tensor, sharding.zero, sharding.pad) == (2, 2, 1, ("vocab",))


@pytest.mark.parametrize("instead, found", [("None", (2, None, 3)), ("tensor", (1, -1, 0))])
def test_the_command_line_s_preset_takes_the_place_of_the_file_s_and_none_undoes_it(instead, found, tmp_path):
    (tmp_path / "mine.py").write_text(FILE.replace("zero = 2", "preset = 'zero1'"))
    assert configured(tmp_path / "mine.py")[1].zero == 1
    mesh, sharding = configured(tmp_path / "mine.py", ("sharding.preset", instead))
    assert (mesh.fsdp, mesh.data, sharding.zero, sharding.pad) == (*found, ("vocab",))


@pytest.mark.parametrize("name", shipped_presets())
def test_each_shipped_one_says_its_mesh_stage_and_axes_so_that_the_file_s_cannot_mix_with_them(name):
    preset = read_preset(name)
    assert preset["mesh"] and "zero" in preset["sharding"]
    assert "zero_axes" in preset["sharding"] or preset["sharding"]["zero"] == 0


def test_a_value_that_is_the_default_again_stays_so_when_the_resolved_configuration_is_read_back(tmp_path):
    """A run's config.json names no preset: else zero=3 would look unset there, and the preset's stage come back."""
    config = load_config("shakespeare", [("sharding.preset", "zero1"), ("sharding.zero", "3")])
    assert config.sharding.zero == 3 and config.sharding.preset is None
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert load_config(str(tmp_path / "config.json")) == config
    other = load_config(str(tmp_path / "config.json"), [("sharding.preset", "fully_sharded")])
    assert (other.mesh.fsdp, other.sharding.zero_axes) == (-1, ("fsdp",))


def test_a_configuration_made_in_python_has_its_preset_applied_too():
    config = to_config({"sharding": {"preset": "fully_sharded"}})
    assert config.mesh.fsdp == -1 and config.sharding.preset is None
    assert to_config(Config()) == Config()


def test_a_file_of_one_s_own_is_a_preset(tmp_path):
    (tmp_path / "mine.py").write_text('"""Mine."""\nimport math\n\nmesh = dict(fsdp=int(math.sqrt(16)))\n')
    assert configured("shakespeare", ("sharding.preset", str(tmp_path / "mine.py")))[0].fsdp == 4


@pytest.mark.parametrize("text, words", [
    ("mesh = dict(fspd=8)", "sets mesh.fspd, which is no key; did you mean 'fsdp'?"),
    ("train = dict(steps=8)", "sets train; a preset sets mesh and sharding"),
    ("mesh = 8", "mesh = 8; expected a dict"),
    ("mesh = dict(", "failed: SyntaxError"),
    ("raise SystemExit(0)", "failed: SystemExit: 0"),
    ("sharding = dict(preset='zero1')", "sets sharding.preset, which is no key"),
])
def test_a_mistake_in_a_preset_is_told_with_its_file(text, words, tmp_path):
    (tmp_path / "mine.py").write_text(text + "\n")
    with pytest.raises(DeclarationError) as error:
        configured("shakespeare", ("sharding.preset", str(tmp_path / "mine.py")))
    assert words in str(error.value) and "mine.py" in str(error.value)


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(DeclarationError, match="neither a .py file nor a shipped preset; did you mean 'hybrid'"):
        configured("shakespeare", ("sharding.preset", "hybird"))
