"""The families of models that Hugging Face folders hold, each a declaration: how config.json and our ModelConfig say the
same, and which tensor holds which of our arrays.

A family is found by `model_type`. What config.json says and this module does not understand is an error wherever it would change
what the model computes; training's own settings there (dropout, initial values) are ours to decide and are left out.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxlm.huggingface.naming import (
    AROUND, BEFORE, ENDS, GROUPS, HEADS, K, O, Q, V, attention, chatglm_tensors, gpt2_tensors, joined_mlp, mlp, norms, qk_norms)
from jaxlm.huggingface.rope import local_theta, read_rope, write_rope
from jaxlm.huggingface.tensors import NEIGHBOURS, Tensor, linear
from partitioning.declaration import DeclarationError

ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
# Tensors that are no weights: tables that older versions saved.
BUFFERS = (r".*\.rotary_emb\.inv_freq", r".*rotary_pos_emb\.inv_freq", r".*\.attn\.(bias|masked_bias)")


@dataclasses.dataclass(frozen=True)
class Family:
    """Attributes:
    model_type, architecture: as config.json names them.
    keys: our model key to the one of config.json that means the same.
    defaults: what config.json may leave out, and what it means then.
    fixed: our model keys that all models of the family share.
    expected: keys of config.json that must have this value where they are there.
    read: the rest of our model keys, from config.json.
    write: the rest of config.json, from a ModelConfig.
    tensors: which tensor holds what, without the prefix. Those of arrays that a model lacks are not in its files.
    prefix: before every tensor's name but the output matrix's; files of the bare model lack it.
    head: the output matrix's name.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    read: Callable[[dict[str, Any]], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    tensors: tuple[Tensor, ...]
    prefix: str = "model."
    head: str = "lm_head.weight"
    expected: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Config.json, as most families have it.

KEYS = dict(
    vocab_size="vocab_size",
    num_layers="num_hidden_layers",
    embed_dim="hidden_size",
    num_heads="num_attention_heads",
    num_kv_heads="num_key_value_heads",
    head_dim="head_dim",
    mlp_dim="intermediate_size",
    norm_epsilon="rms_norm_eps",
    max_positions="max_position_embeddings",
    tie_embeddings="tie_word_embeddings",
)
DEFAULTS = dict(num_key_value_heads=None, head_dim=None, rms_norm_eps=1e-6, tie_word_embeddings=False, hidden_act="silu")
RMS = dict(norm="rmsnorm", position="rope", bias=False)


def _gated(config: dict[str, Any], key: str = "hidden_act") -> dict[str, Any]:
    name = config[key]
    if name not in GATED:
        raise DeclarationError(f"config.json has {key} = {name!r}; this family's MLP is known with: {', '.join(GATED)}.")
    return {"activation": GATED[name]}


def _gate(model: Any, key: str = "hidden_act") -> dict[str, Any]:
    return {key: {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}.get(model.activation)}


def _biases(config: dict[str, Any], *, output: bool = True) -> dict[str, Any]:
    """`attention_bias` and, where there is one, `mlp_bias`."""
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    return {"qkv_bias": attention, "output_bias": attention and output, "mlp_bias": mlp}


def _sliding(config: dict[str, Any], pattern: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: of those that `layer_types` calls sliding, or that `pattern` does where there is no such list."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    types = config.get("layer_types") or ["sliding_attention" if pattern(i) else "full_attention" for i in range(count)]
    if len(types) != count:
        raise DeclarationError(f"config.json has {len(types)} layer_types for {count} layers.")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise DeclarationError(f"config.json has layer_types {sorted(unknown)}; known: sliding_attention, full_attention.")
    if window is None and "sliding_attention" in types:
        raise DeclarationError("config.json has layers of sliding attention, and no sliding_window.")
    return _shortest(tuple(window if kind == "sliding_attention" else None for kind in types))


def _shortest(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The shortest pattern that, repeated, gives these."""
    return next(windows[:n] for n in range(1, len(windows) + 1) if all(w == windows[i % n] for i, w in enumerate(windows)))


def _layer_types(model: Any) -> dict[str, Any]:
    windows = model.windows()
    return {
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "sliding_window": next((w for w in windows if w is not None), None),
    }


def _llama(config):
    return {**_gated(config), **_biases(config), **read_rope(config)}


def _write_llama(model):
    return {**_gate(model), **write_rope(model), "attention_bias": model.has_bias("qkv"), "mlp_bias": model.has_bias("mlp")}


def _mistral(config):
    return {**_gated(config), **read_rope(config), "window_pattern": (config.get("sliding_window"),)}


def _write_mistral(model):
    return {**_gate(model), **write_rope(model), "sliding_window": model.windows()[0]}


def _qwen(config):
    first = config["max_window_layers"] if config.get("use_sliding_window") else config["num_hidden_layers"]
    return {**_gated(config), **read_rope(config), "window_pattern": _sliding(config, lambda i: i >= first)}


def _write_qwen(model):
    types = _layer_types(model)
    return {**_gate(model), **write_rope(model), **types, "use_sliding_window": types["sliding_window"] is not None}


def _gemma2(config):
    return {
        **_gated(config, "hidden_activation"),
        **_biases(config),
        **read_rope(config),
        **_gemma_scales(config),
        "attention_softcap": config["attn_logit_softcapping"],
        "window_pattern": _sliding(config, lambda i: i % 2 == 0),
    }


def _gemma3(config):
    every = config.get("sliding_window_pattern") or 6
    return {
        **_gated(config, "hidden_activation"),
        **_biases(config),
        **read_rope(config),
        **_gemma_scales(config),
        "rope_local_theta": local_theta(config),
        "window_pattern": _sliding(config, lambda i: (i + 1) % every != 0),
    }


def _gemma_scales(config):
    return {
        "embed_scale": config["hidden_size"] ** 0.5,
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "logit_softcap": config["final_logit_softcapping"],
    }


def _write_gemma(model):
    scalar = None if model.attention_scale is None else model.attention_scale**-2
    return {
        **_gate(model, "hidden_activation"),
        "hidden_act": "gelu_pytorch_tanh",
        **_layer_types(model),
        **write_rope(model),
        "attention_bias": model.has_bias("qkv"),
        "final_logit_softcapping": model.logit_softcap,
        "query_pre_attn_scalar": scalar and (round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar),
    }


def _write_gemma2(model):
    return {**_write_gemma(model), "attn_logit_softcapping": model.attention_softcap}


def _write_gemma3(model):
    return {**_write_gemma(model), "rope_local_base_freq": model.rope_local_theta}


def _phi3(config):
    return {**_gated(config), **read_rope(config, partial=True), "window_pattern": (config.get("sliding_window"),)}


def _write_phi3(model):
    scaling = model.rope_scaling or {}
    return {
        **_gate(model),
        **write_rope(model),
        "sliding_window": model.windows()[0],
        "original_max_position_embeddings": scaling.get("original_max_positions", model.max_positions),
    }


def _olmo2(config):
    return {**_gated(config), **_biases(config), **read_rope(config)}


def _glm(config):
    return {**_gated(config), **_biases(config, output=False), **read_rope(config, partial=True)}


def _write_attention_bias(model):
    return {**_gate(model), **write_rope(model), "attention_bias": model.has_bias("qkv")}


def _chatglm(config):
    groups = config["multi_query_group_num"] if config.get("multi_query_attention") else config["num_attention_heads"]
    return {
        "num_kv_heads": groups,
        "qkv_bias": config.get("add_qkv_bias", False) or config.get("add_bias_linear", False),
        "rope_theta": 10_000.0 * config.get("rope_ratio", 1),
        "activation": "swiglu",
    }


def _write_chatglm(model):
    return {
        "multi_query_attention": model.kv_heads != model.num_heads,
        "multi_query_group_num": model.kv_heads,
        "add_qkv_bias": model.has_bias("qkv"),
        "rope_ratio": model.rope_theta / 10_000.0,
        "original_rope": True,
    }


def _gpt2(config):
    name = config["activation_function"]
    if name not in ACTIVATIONS:
        raise DeclarationError(f"config.json has activation_function = {name!r}; known: {', '.join(ACTIVATIONS)}.")
    return {"activation": ACTIVATIONS[name], "mlp_dim": config["n_inner"] or 4 * config["n_embd"]}


def _write_gpt2(model):
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {"activation_function": names.get(model.activation), "n_inner": model.mlp_dim, "n_ctx": model.max_positions}


LLAMA_TENSORS = (*ENDS, *BEFORE, *attention(), *mlp())
GEMMA_DEFAULTS = dict(
    DEFAULTS,
    num_key_value_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
)
GEMMA = dict(RMS, norm_placement="both", norm_unit_offset=True)
GLM = dict(RMS, mlp_bias=False, output_bias=False)
GLM_DEFAULTS = dict(
    DEFAULTS, attention_bias=True, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, head_dim=128, num_key_value_heads=2
)

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            KEYS,
            dict(DEFAULTS, max_position_embeddings=2048),
            RMS,
            _llama,
            _write_llama,
            LLAMA_TENSORS,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            KEYS,
            dict(DEFAULTS, num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131_072),
            RMS,
            _mistral,
            _write_mistral,
            LLAMA_TENSORS,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            KEYS,
            dict(DEFAULTS, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768),
            dict(RMS, qkv_bias=True),
            _qwen,
            _write_qwen,
            LLAMA_TENSORS,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            KEYS,
            dict(DEFAULTS, head_dim=128, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768),
            dict(RMS, qk_norm=True),
            lambda c: _qwen(c) | _biases(c),
            lambda m: _write_qwen(m) | {"attention_bias": m.has_bias("qkv")},
            (*LLAMA_TENSORS, *qk_norms()),
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            KEYS,
            dict(
                GEMMA_DEFAULTS,
                final_logit_softcapping=30.0,
                attn_logit_softcapping=50.0,
                max_position_embeddings=8192,
            ),
            GEMMA,
            _gemma2,
            _write_gemma2,
            (*ENDS, *AROUND, *attention(), *mlp()),
            expected={"use_bidirectional_attention": (None, False)},
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            KEYS,
            dict(
                GEMMA_DEFAULTS,
                final_logit_softcapping=None,
                rope_theta=1_000_000.0,
                max_position_embeddings=131_072,
            ),
            dict(GEMMA, qk_norm=True),
            _gemma3,
            _write_gemma3,
            (*ENDS, *AROUND, *attention(), *mlp(), *qk_norms()),
            expected={"use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,)},
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            KEYS,
            dict(DEFAULTS, rms_norm_eps=1e-5, sliding_window=None, max_position_embeddings=4096),
            RMS,
            _phi3,
            _write_phi3,
            (
                *ENDS,
                *BEFORE,
                *linear("layers.{layer}.self_attn.qkv_proj", (Q, HEADS, "embed"), (K, GROUPS, "embed"), (V, GROUPS, "embed")),
                *linear("layers.{layer}.self_attn.o_proj", (O, "embed", HEADS)),
                *joined_mlp(),
            ),
        ),
        Family(
            "olmo2",
            "Olmo2ForCausalLM",
            KEYS,
            dict(DEFAULTS, rms_norm_eps=1e-5, max_position_embeddings=2048),
            dict(RMS, norm_placement="after", qk_norm=True, qk_norm_over="all"),
            _olmo2,
            _write_attention_bias,
            (
                *ENDS,
                *norms(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"),
                *attention(),
                *mlp(),
                *qk_norms(HEADS, GROUPS),
            ),
        ),
        Family(
            "glm",
            "GlmForCausalLM",
            KEYS,
            dict(GLM_DEFAULTS, max_position_embeddings=131_072),
            GLM,
            _glm,
            _write_attention_bias,
            (*ENDS, *BEFORE, *attention(pairs=NEIGHBOURS), *joined_mlp()),
        ),
        Family(
            "glm4",
            "Glm4ForCausalLM",
            KEYS,
            dict(GLM_DEFAULTS, max_position_embeddings=131_072),
            dict(GLM, norm_placement="both"),
            _glm,
            _write_attention_bias,
            (
                *ENDS,
                *norms(
                    attention_norm="input_layernorm",
                    attention_out_norm="post_self_attn_layernorm",
                    mlp_norm="post_attention_layernorm",
                    mlp_out_norm="post_mlp_layernorm",
                ),
                *attention(pairs=NEIGHBOURS),
                *joined_mlp(),
            ),
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            dict(
                vocab_size="vocab_size",
                num_layers="n_layer",
                embed_dim="n_embd",
                num_heads="n_head",
                max_positions="n_positions",
                norm_epsilon="layer_norm_epsilon",
                tie_embeddings="tie_word_embeddings",
            ),
            dict(
                n_positions=1024, layer_norm_epsilon=1e-5, tie_word_embeddings=True, n_inner=None, activation_function="gelu_new"
            ),
            dict(norm="layernorm", position="learned", bias=True),
            _gpt2,
            _write_gpt2,
            gpt2_tensors(),
            prefix="transformer.",
            expected={
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
        ),
        Family(
            "chatglm",
            "ChatGLMModel",
            dict(
                vocab_size="padded_vocab_size",
                num_layers="num_layers",
                embed_dim="hidden_size",
                num_heads="num_attention_heads",
                head_dim="kv_channels",
                mlp_dim="ffn_hidden_size",
                norm_epsilon="layernorm_epsilon",
                max_positions="seq_length",
                tie_embeddings="tie_word_embeddings",
            ),
            dict(tie_word_embeddings=False, layernorm_epsilon=1e-5),
            dict(GLM, rope_fraction=0.5),
            _chatglm,
            _write_chatglm,
            chatglm_tensors(),
            prefix="transformer.",
            head="transformer.output_layer.weight",
            expected={
                "rmsnorm": (True,),
                "post_layer_norm": (True,),
                "apply_residual_connection_post_layernorm": (False,),
                "add_bias_linear": (False,),
                "original_rope": (True,),
            },
        ),
    )
}
