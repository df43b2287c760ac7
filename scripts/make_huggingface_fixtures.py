"""What `transformers` computes for small random models of every family, for the tests to hold ours against.

    python3.11 -m venv ENV && ENV/bin/pip install torch transformers safetensors
    ENV/bin/python scripts/make_huggingface_fixtures.py tests/data/huggingface

Writes a folder for each model: config.json, weights, and reference.safetensors with tokens, logits, loss and gradients. Needs
torch and transformers and nothing of this project. The sequences are longer than the windows; one is padded at its end, one at
its beginning.
"""

import pathlib
import sys

import numpy as np

LENGTH, VOCABULARY, PADDING = 20, 61, 7
SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0)
SHORT = 8                                      # a sequence that LongRoPE calls short
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
LONG = dict(rope_type="longrope", rope_theta=500.0, short_factor=[1.0, 1.5], long_factor=[1.5, 3.0],
            original_max_position_embeddings=16)
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPE = dict(full_attention=dict(rope_type="linear", factor=2.0, rope_theta=1000.0),
                   sliding_attention=dict(rope_type="default", rope_theta=50.0))
# name: (model_type, what differs from SIZES)
MODELS = {
    "gpt2": ("gpt2", dict(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=4, n_inner=20, n_positions=64)),
    "llama": ("llama", dict(head_dim=8, rope_parameters=LLAMA3)),
    "llama_biases": ("llama", dict(attention_bias=True, mlp_bias=True,
                                   rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=100.0))),
    "smollm2": ("llama", dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=24, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(sliding_window=6)),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=8, tie_word_embeddings=True)),
    "gemma2": ("gemma2", dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=5, attn_logit_softcapping=3.0,
                              final_logit_softcapping=4.0)),
    "gemma3": ("gemma3_text", dict(num_hidden_layers=4, head_dim=8, sliding_window=6, query_pre_attn_scalar=5, layer_types=LAYERS,
                                   rope_parameters=GEMMA3_ROPE)),
    "phi3": ("phi3", dict(sliding_window=6)),
    "phi3_long": ("phi3", dict(rope_parameters=LONG, original_max_position_embeddings=16)),
    "olmo2": ("olmo2", dict()),
    "glm": ("glm", dict(head_dim=8, num_key_value_heads=1)),
    "glm4": ("glm4", dict(head_dim=8)),
}
SHARDED = ("llama",)                           # in several files, with an index


def build(name: str, seed: int):
    """A model of transformers in float32, no parameter of which has a special value."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = MODELS[name]
    config = AutoConfig.for_model(kind, **({} if kind == "gpt2" else SIZES) | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
            parameter.copy_(0.25 * drawn if parameter.ndim > 1 else parameter + 0.2 * drawn)
    return model


def batch(seed: int, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Three sequences: whole, padded at the end, padded at the beginning. `real` marks tokens, `mask` those with a target."""
    tokens = np.random.default_rng(seed).integers(1, VOCABULARY, (3, length)).astype(np.int32)
    padding = min(PADDING, length // 2)
    real = np.ones_like(tokens)
    real[1, length - padding:] = real[2, :padding] = 0
    positions = np.maximum(np.cumsum(real, 1) - 1, 0).astype(np.int32)
    targets = np.concatenate([tokens[:, 1:], tokens[:, :1]], 1)
    mask = real * np.concatenate([real[:, 1:], np.zeros_like(real[:, :1])], 1)
    return dict(tokens=tokens * real, real=real, positions=positions, targets=targets, mask=mask)


def reference(model, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits, the mean loss over the targets and its gradient for every tensor."""
    import torch

    tensors = {key: torch.from_numpy(value).long() for key, value in data.items()}
    model.zero_grad()
    logits = model(input_ids=tensors["tokens"], attention_mask=tensors["real"], position_ids=tensors["positions"],
                   use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tensors["targets"], reduction="none")
    loss = (losses * tensors["mask"]).sum() / tensors["mask"].sum()
    loss.backward()
    gradients = {f"gradient/{name}": p.grad.numpy() for name, p in model.named_parameters()}
    return {"logits": logits.detach().numpy(), "loss": loss.detach().numpy(), **gradients}


def main(out: pathlib.Path) -> None:
    import torch
    import transformers
    from safetensors.numpy import save_file

    total = 0
    for number, name in enumerate(MODELS):
        folder, model, data = out / name, build(name, number), batch(number)
        model.save_pretrained(folder, max_shard_size="24KB" if name in SHARDED else "5GB")
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        save_file({**data, **reference(model, data)}, folder / "reference.safetensors", versions)
        (folder / "generation_config.json").unlink(missing_ok=True)
        size = sum(path.stat().st_size for path in folder.iterdir())
        total += size
        print(f"{name}: {size:,} bytes")
    print(f"{total:,} bytes in all")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
