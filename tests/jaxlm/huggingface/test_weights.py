"""Weights of a folder: the same bits on every mesh, and each mistake in the files named."""

import json
import shutil
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlm.config import to_config
from jaxlm.huggingface.folder import Tensors
from jaxlm.huggingface.weights import Weights
from jaxlm.job import build_job
from partitioning.declaration import DeclarationError
from partitioning.paths import flatten
from tests.jaxlm.huggingface.models import FOLDERS, as_tensors, read


def job_of(folder, mesh, **sharding):
    values = {"model": {"from_hf": str(folder)}, "mesh": mesh, "sharding": sharding, "train": {"global_batch_size": 16},
              "data": {"sequence_length": 32}}
    return build_job(to_config(values), 8).on_devices()


@pytest.mark.parametrize("name, mesh, sharding", [
    ("llama", dict(fsdp=8), {}), ("glm", dict(data=2, fsdp=4), {}), ("gpt2", dict(fsdp=4, tensor=2), dict(pad=("vocab",))),
    ("olmo2", dict(data=2, fsdp=2, tensor=2), dict(pad=("vocab",))), ("gemma3", dict(pipe=4, fsdp=2), {})])
def test_every_mesh_reads_the_same_bits(name, mesh, sharding):
    model, params, family = read(FOLDERS / name)
    job = job_of(FOLDERS / name, mesh, **sharding)
    wanted = {"params": job.abstract_saved()["params"]}
    found = Weights(FOLDERS / name).restore(0, wanted)["params"]
    for path, x in flatten(found).items():
        assert x.sharding == flatten(wanted)[f"params/{path}"].sharding
        assert np.array_equal(x, flatten(params)[path]), path
    tensors = load_file(FOLDERS / name / "model.safetensors") if name != "llama" else None
    ours = as_tensors(model, family, params)
    assert tensors is None or ours.keys() == tensors.keys() and all(np.array_equal(ours[key], x) for key, x in tensors.items())


def test_what_several_devices_hold_is_not_one_memory():
    found = Weights(FOLDERS / "llama").restore(0, {"params": job_of(FOLDERS / "llama", dict(data=8)).abstract_saved()["params"]})
    for x in jax.tree.leaves(found):
        assert len({shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}) == 8


def test_the_original_chatglm_is_the_glm_under_other_names(tmp_path):
    """Its folders join queries, keys and values, and name everything otherwise; nobody else's code for it is at hand."""
    model, params, _ = read(FOLDERS / "glm")
    old = load_file(FOLDERS / "glm" / "model.safetensors")
    new = {}
    for name, x in old.items():
        at = "transformer.encoder.layers." + name.split(".")[2] if ".layers." in name else ""
        for theirs, ours in (("self_attn.o_proj", "self_attention.dense"), ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
                             ("mlp.down_proj", "mlp.dense_4h_to_h"), ("input_layernorm", "input_layernorm"),
                             ("post_attention_layernorm", "post_attention_layernorm")):
            if theirs in name:
                new[f"{at}.{ours}.weight"] = x
        if "q_proj" in name:
            parts = [old[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            new[f"{at}.self_attention.query_key_value.{name.rpartition('.')[2]}"] = np.concatenate(parts)
    new |= {"transformer.embedding.word_embeddings.weight": old["model.embed_tokens.weight"],
            "transformer.encoder.final_layernorm.weight": old["model.norm.weight"],
            "transformer.output_layer.weight": old["lm_head.weight"],
            "transformer.rotary_pos_emb.inv_freq": np.ones(2, np.float32)}
    save_file(new, tmp_path / "model.safetensors")
    c = model.config
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="chatglm", padded_vocab_size=c.vocab_size, num_layers=c.num_layers, hidden_size=c.embed_dim,
        num_attention_heads=c.num_heads, kv_channels=c.head_dim, ffn_hidden_size=c.mlp_dim, layernorm_epsilon=c.norm_epsilon,
        seq_length=c.max_positions, multi_query_attention=True, multi_query_group_num=1, add_qkv_bias=True, add_bias_linear=False,
        rmsnorm=True, post_layer_norm=True, original_rope=True)))
    again, same, _ = read(tmp_path)
    assert again.config == model.config
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), params, same)


def changed(tmp_path, change, config=None):
    """A copy of the Mistral folder with its tensors changed."""
    shutil.copytree(FOLDERS / "mistral", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    if config:
        place = tmp_path / "model" / "config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | config))
    return tmp_path / "model"


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop(K), rf"{K}: missing; expected of shape \(8, 16\)"),
    (lambda t: t.update({K: t[K][:4]}), rf"{K}: shape \(4, 16\), expected \(8, 16\)"),
    (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": t[K]}), r"model.layers.3.mlp.up_proj.weight: unknown, of shape"),
    (lambda t: t.update({K: t[K].astype(np.int8)}), "dtype I8; expected one of F64, F32, F16, BF16")])
def test_a_tensor_that_is_missing_misshapen_unknown_or_of_another_kind_is_named(change, message, tmp_path):
    with pytest.raises(DeclarationError, match=message):
        Weights(changed(tmp_path, change))


def test_a_config_json_whose_values_are_none_of_a_model_is_refused(tmp_path):
    for number, (key, value) in enumerate([("num_hidden_layers", "3"), ("num_attention_heads", 0), ("num_key_value_heads", 3)]):
        with pytest.raises(DeclarationError, match="config.model.num_"):
            Weights(changed(tmp_path / str(number), lambda tensors: None, {key: value}))


def test_a_bare_model_without_the_prefix_is_read_and_buffers_are_passed_over(tmp_path):
    def bare(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    _, params, _ = read(FOLDERS / "mistral")
    _, same, _ = read(changed(tmp_path, bare))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), params, same)


def test_a_tied_output_matrix_that_is_in_the_file_must_be_the_embedding(tmp_path):
    config = dict(tie_word_embeddings=True)
    with pytest.raises(DeclarationError, match="lm_head.weight differs from model.embed_tokens.weight"):
        Weights(changed(tmp_path / "a", lambda t: None, config))
    same = changed(tmp_path / "b", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), config)
    assert "lm_head/kernel" not in Weights(same).specs


def test_files_that_are_missing_cut_short_or_something_else_are_named(tmp_path):
    folder = shutil.copytree(FOLDERS / "llama", tmp_path / "llama")
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("model-*"))
    assert len(files) > 1
    kept = files[1].read_bytes()
    files[1].write_bytes(kept[:-10])
    with pytest.raises(DeclarationError, match=rf"{files[1].name} is cut short"):
        Tensors(folder)
    files[1].write_bytes(b"no header")
    with pytest.raises(DeclarationError, match="is no safetensors file"):
        Tensors(folder)
    for header in (b"[]", b'{"x": {}}', b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
                   b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "y": {"dtype": "U8", "shape": [4], '
                   b'"data_offsets": [2, 6]}}' + bytes(8)):
        files[1].write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(DeclarationError, match="is no safetensors file"):
            Tensors(folder)
    files[1].write_bytes(b"\xff" * 16)
    with pytest.raises(DeclarationError, match="is no safetensors file"):
        Tensors(folder)
    files[1].unlink()
    with pytest.raises(DeclarationError, match=f"there is no .*{files[1].name}"):
        Tensors(folder)
    files[1].write_bytes(kept)
    values = json.loads(index.read_text())
    values["weight_map"]["lost"] = files[0].name
    index.write_text(json.dumps(values))
    with pytest.raises(DeclarationError, match="puts lost into"):
        Tensors(folder)
    index.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(DeclarationError, match="only pytorch_model.bin; save the model as safetensors first"):
        Tensors(folder)
    with pytest.raises(DeclarationError, match="no folder of a Hugging Face model.*Nothing is looked up or downloaded"):
        Weights("org/some-model")
