"""The model's logits against an independent implementation in numpy, float64, one token at a time."""

import math

import jax
import numpy as np
import pytest

from tests.jaxlm.models.tiny import GPT2, LLAMA, B, L, batch, tiny


def normalise(x, p, kind, epsilon):
    if kind == "layernorm":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * p["scale"] + p.get("bias", 0)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * p["scale"]


def act(x, kind):
    if kind in ("swiglu", "silu"):
        return x / (1 + np.exp(-x))
    if kind in ("gelu", "geglu"):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    if kind == "gelu_exact":
        return x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
    return np.maximum(x, 0) ** (2 if kind == "relu_squared" else 1)


def turn(x, position, theta):
    """Half-split rotation, pair by pair, as complex numbers."""
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    turned = pairs * np.exp(1j * position * np.array([theta ** (-2 * i / len(x)) for i in range(half)]))
    return np.concatenate([turned.real, turned.imag])


def linear(x, p, out):
    """x against a kernel whose leading dims fill x, to shape `out`."""
    kernel = p["kernel"].reshape(x.shape[-1], -1)
    return (x @ kernel + p["bias"].reshape(-1) if "bias" in p else x @ kernel).reshape(*x.shape[:-1], *out)


def logits_of_row(c, params, tokens):
    """Float64 logits [L, V] of one row."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    H, G, K = c.num_heads, c.kv_heads, c.head_width
    x = params["embed"]["embedding"][tokens]
    if c.position == "learned":
        x = x + params["positions"]["embedding"][:len(tokens)]
    for i, window in enumerate(c.windows()):
        p = jax.tree.map(lambda a: a[i], params["layers"])
        h, a = normalise(x, p["attention_norm"], c.norm, c.norm_epsilon), p["attention"]
        q, k, v = (linear(h, a[n], (heads, K)) for n, heads in (("query", H), ("key", G), ("value", G)))
        if c.qk_norm:
            q, k = (normalise(y, a[n], "rmsnorm", c.norm_epsilon) for y, n in ((q, "query_norm"), (k, "key_norm")))
        if c.position == "rope":
            q, k = (np.array([[turn(head, t, c.rope_theta) for head in row] for t, row in enumerate(y)]) for y in (q, k))
        attended = np.zeros((len(tokens), H, K))
        for t in range(len(tokens)):
            first = 0 if window is None else max(0, t - window + 1)
            for head in range(H):
                g = head // (H // G)
                scores = k[first:t + 1, g] @ q[t, head] / math.sqrt(K)
                if c.attention_softcap:
                    scores = c.attention_softcap * np.tanh(scores / c.attention_softcap)
                weights = np.exp(scores)
                attended[t, head] = weights / weights.sum() @ v[first:t + 1, g]
        x = x + linear(attended.reshape(len(tokens), H * K), a["output"], (c.embed_dim,))
        h, m = normalise(x, p["mlp_norm"], c.norm, c.norm_epsilon), p["mlp"]
        up = linear(h, m["up"], (c.mlp_dim,))
        hidden = act(linear(h, m["gate"], (c.mlp_dim,)), c.activation) * up if c.gated else act(up, c.activation)
        x = x + linear(hidden, m["down"], (c.embed_dim,))
    x = normalise(x, params["final_norm"], c.norm, c.norm_epsilon)
    out = x @ (params["embed"]["embedding"].T if c.tie_embeddings else params["lm_head"]["kernel"])
    return c.logit_softcap * np.tanh(out / c.logit_softcap) if c.logit_softcap else out


CASES = {
    "gpt2": (GPT2, {}),
    "llama": (LLAMA, {}),
    "gpt2 exact gelu": (GPT2, dict(activation="gelu_exact")),
    "gpt2 relu squared, untied": (GPT2, dict(activation="relu_squared", tie_embeddings=False)),
    "llama geglu, tied, biases": (LLAMA, dict(activation="geglu", tie_embeddings=True, bias=True)),
    "llama qk norm, caps, windows": (
        LLAMA, dict(qk_norm=True, attention_softcap=1.5, logit_softcap=2.0, window_pattern=(3, None))),
    "llama one window for all": (LLAMA, dict(window_pattern=(5,))),
    "no positions": (LLAMA, dict(position="none", activation="silu")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scan", [True, False])
def test_logits_are_those_of_numpy(name, scan):
    shape, changes = CASES[name]
    model, params = tiny(shape, **changes, scan_layers=scan)
    tokens = batch()["inputs"]
    got = jax.jit(model.logits)(params, tokens)
    assert got.dtype == np.float32 and got.shape == (B, L, 37)
    for row in range(2):
        np.testing.assert_allclose(got[row], logits_of_row(model.config, params, tokens[row]), atol=2e-5)
