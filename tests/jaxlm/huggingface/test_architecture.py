"""config.json and ModelConfig: each says what the other does, and what is not understood is refused."""

import dataclasses
import json

import pytest

from jaxlm.config import ModelConfig, to_config
from jaxlm.huggingface.architecture import config_json, find_family, mismatches, model_values
from jaxlm.huggingface.families import FAMILIES
from partitioning.declaration import DeclarationError
from tests.jaxlm.huggingface.models import FOLDERS, NAMES

LLAMA = dict(model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def config_of(name):
    return json.loads((FOLDERS / name / "config.json").read_text())


def model_of(config):
    return to_config({"model": model_values(config), "data": {"sequence_length": 32}}).model


@pytest.mark.parametrize("name", NAMES)
def test_a_model_goes_to_config_json_and_back(name):
    given = config_of(name)
    model = model_of(given)
    written = config_json(model, FAMILIES[given["model_type"]])       # in the older form, with rope_theta and rope_scaling
    assert "rope_parameters" not in written and written["architectures"] == given["architectures"]
    assert not mismatches(model, json.loads(json.dumps(written)))


def test_the_family_of_a_model_is_found_by_what_it_has():
    kinds = {name: config_of(name)["model_type"] for name in NAMES}
    found = {name: find_family(model_of(config_of(name))).model_type for name in NAMES}
    alike = {"phi3": "mistral", "phi3_long": "llama"}     # Phi-3 is one of them, with its matrices joined in the file
    assert found == {name: alike.get(name, kind) for name, kind in kinds.items()}


def test_a_model_that_no_family_has_is_told_why():
    with pytest.raises(DeclarationError, match="no family has models like this one; the nearest is .*activation"):
        find_family(ModelConfig(activation="relu_squared", qk_norm=True))


@pytest.mark.parametrize("changes, model", [
    (dict(), dict(num_kv_heads=None, rope_theta=10_000.0, max_positions=2048, tie_embeddings=False)),
    (dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2)),
     dict(rope_theta=5e5, rope_scaling=dict(kind="linear", factor=2.0))),
    (dict(attention_bias=True), dict(qkv_bias=True, output_bias=True, mlp_bias=False)),
    (dict(model_type="mistral", sliding_window=None), dict(window_pattern=(None,), num_kv_heads=8)),
    (dict(model_type="qwen2", use_sliding_window=False, sliding_window=9), dict(window_pattern=(None,), qkv_bias=True)),
    (dict(model_type="phi3", partial_rotary_factor=0.5, sliding_window=5), dict(rope_fraction=0.5, window_pattern=(5,))),
    (dict(model_type="gemma2", num_hidden_layers=4, head_dim=8), dict(window_pattern=(4096, None), attention_softcap=50.0)),
    (dict(model_type="gemma3_text", num_hidden_layers=12, rope_local_base_freq=5.0, sliding_window_pattern=3),
     dict(window_pattern=(4096, 4096, None), rope_local_theta=5.0, rope_theta=1e6))])
def test_what_a_config_json_leaves_out_has_the_family_s_default(changes, model):
    values = model_values({**LLAMA, **changes})
    assert {key: values[key] for key in model} == model


@pytest.mark.parametrize("changes, message", [
    (dict(model_type="mamba"), "model_type = 'mamba'; the families that are known: llama, mistral"),
    (dict(model_type="gpt2"), "lacks n_layer, n_embd, n_head"),
    (dict(hidden_act="relu"), "hidden_act = 'relu'"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5, which its family is not known with"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4)), "type 'yarn'"),
    (dict(rope_scaling=dict(rope_type="linear")), "model_type llama lacks 'factor'"),
    (dict(rope_scaling="linear"), "model_type llama cannot be understood"),
    (dict(quantization_config=dict(bits=4)), "quantised weights are not read"),
    (dict(compression_config=dict(bits=4)), "compression_config: quantised weights are not read"),
    (dict(model_type="gemma2", sliding_window=None), "no sliding_window"),
    (dict(model_type="gemma2", use_bidirectional_attention=True), "use_bidirectional_attention = True"),
    (dict(model_type="gemma2", layer_types=["full_attention"] * 9), "9 layer_types for 2 layers"),
    (dict(model_type="qwen3", layer_types=["full_attention", "linear_attention"]), "known: sliding_attention")])
def test_what_is_not_understood_is_refused(changes, message):
    with pytest.raises(DeclarationError, match=message):
        model_values({**LLAMA, **changes})


def test_training_s_own_keys_make_no_difference():
    model = dataclasses.replace(model_of(LLAMA), dropout=0.1, scan_layers=False)
    assert not mismatches(model, LLAMA)
    assert mismatches(dataclasses.replace(model, rope_theta=5.0), LLAMA) == [("rope_theta", 5.0, 10_000.0)]
