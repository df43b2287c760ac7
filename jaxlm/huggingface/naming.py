"""How families name their tensors: what most of them share, and the names of those that share nothing."""

from jaxlm.huggingface.tensors import NEIGHBOURS, Tensor, linear, norm

Q, K, V, O = (f"layers/attention/{name}" for name in ("query", "key", "value", "output"))
GATE, UP, DOWN = (f"layers/mlp/{name}" for name in ("gate", "up", "down"))
HEADS, GROUPS = "heads head_dim", "kv_heads head_dim"


def attention(at: str = "layers.{layer}.self_attn", pairs: str = "halves") -> tuple[Tensor, ...]:
    """Four projections of their own."""
    return (
        *linear(f"{at}.q_proj", (Q, HEADS, "embed"), pairs=pairs),
        *linear(f"{at}.k_proj", (K, GROUPS, "embed"), pairs=pairs),
        *linear(f"{at}.v_proj", (V, GROUPS, "embed")),
        *linear(f"{at}.o_proj", (O, "embed", HEADS)),
    )


def mlp(at: str = "layers.{layer}.mlp") -> tuple[Tensor, ...]:
    """A gated MLP of three projections."""
    return (
        *linear(f"{at}.gate_proj", (GATE, "mlp", "embed")),
        *linear(f"{at}.up_proj", (UP, "mlp", "embed")),
        *linear(f"{at}.down_proj", (DOWN, "embed", "mlp")),
    )


def joined_mlp(gate_up: str = "layers.{layer}.mlp.gate_up_proj", down: str = "layers.{layer}.mlp.down_proj"):
    """A gated MLP whose gate and up are one tensor."""
    return (*linear(gate_up, (GATE, "mlp", "embed"), (UP, "mlp", "embed")), *linear(down, (DOWN, "embed", "mlp")))


def norms(**names: str) -> tuple[Tensor, ...]:
    """Our norm of a block to the name of its own."""
    return tuple(t for ours, name in names.items() for t in norm(f"layers.{{layer}}.{name}", f"layers/{ours}"))


def qk_norms(pattern: str = "head_dim", keys: str = "head_dim") -> tuple[Tensor, ...]:
    """Gains of queries and keys."""
    at = "layers.{layer}.self_attn"
    return (norm(f"{at}.q_norm", f"{Q}_norm", pattern)[0], norm(f"{at}.k_norm", f"{K}_norm", keys)[0])


ENDS = (Tensor("embed_tokens.weight", (("embed/embedding", "vocab, embed"),)), *norm("norm", "final_norm"))
BEFORE = norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
AROUND = norms(
    attention_norm="input_layernorm",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gpt2_tensors():
    at = "h.{layer}"
    return (
        Tensor("wte.weight", (("embed/embedding", "vocab, embed"),)),
        Tensor("wpe.weight", (("positions/embedding", "place, embed"),)),
        *norm(f"{at}.ln_1", "layers/attention_norm"),
        *norm(f"{at}.ln_2", "layers/mlp_norm"),
        *norm("ln_f", "final_norm"),
        *linear(f"{at}.attn.c_attn", (Q, HEADS, "embed"), (K, GROUPS, "embed"), (V, GROUPS, "embed"), transposed=True),
        *linear(f"{at}.attn.c_proj", (O, "embed", HEADS), transposed=True),
        *linear(f"{at}.mlp.c_fc", (UP, "mlp", "embed"), transposed=True),
        *linear(f"{at}.mlp.c_proj", (DOWN, "embed", "mlp"), transposed=True),
    )


def chatglm_tensors():
    at = "encoder.layers.{layer}"
    return (
        Tensor("embedding.word_embeddings.weight", (("embed/embedding", "vocab, embed"),)),
        *norm("encoder.final_layernorm", "final_norm"),
        *norm(f"{at}.input_layernorm", "layers/attention_norm"),
        *norm(f"{at}.post_attention_layernorm", "layers/mlp_norm"),
        *linear(
            f"{at}.self_attention.query_key_value",
            (Q, HEADS, "embed"),
            (K, GROUPS, "embed"),
            (V, GROUPS, "embed"),
            pairs=NEIGHBOURS,
        ),
        *linear(f"{at}.self_attention.dense", (O, "embed", HEADS)),
        *joined_mlp(f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h"),
    )
