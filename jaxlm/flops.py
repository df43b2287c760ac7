"""How much arithmetic a training step needs, and how much a device could do: their ratio is the MFU.

Model FLOPs count what the mathematics of one training step needs, once: 2 FLOPs per multiply-add, and three matmuls of the
same size per matmul of the model (one forward, two backward: Kaplan et al. 2020, section 2.1). Looking up an embedding is
no matmul and counts nothing; the output matrix is one, tied or not. Of causal attention only the half that is needed
counts. What is recomputed in the backward pass (remat) does not count: it buys memory, not learning (Chowdhery et al. 2022,
appendix B, on the difference between MFU and hardware utilisation).
"""

import re

from jaxlm.config import ModelConfig

# Peak matmul rate of one JAX device in FLOP/s, dense (no structured sparsity), from the vendors' data sheets: the pattern
# is searched in `device.device_kind`, the first row that fits wins. float32 on NVIDIA GPUs is TF32 where the chip has it,
# which is what JAX uses there by default; on TPUs it is bfloat16 passes.
# pattern                          bfloat16  float16   float32     source
_PEAKS = (
    (r"\bGB200\b",                 2500e12,  2500e12,  1250e12),   # NVIDIA GB200 NVL72 data sheet, half of the sparse rates
    (r"\bB200\b",                  2250e12,  2250e12,  1125e12),   # NVIDIA Blackwell architecture brief (HGX B200), likewise
    (r"\b(H200|GH200)\b",           989e12,   989e12,   494e12),   # NVIDIA H200 and GH200 data sheets, likewise
    (r"\bH100 NVL\b",               835e12,   835e12,   418e12),   # NVIDIA H100 data sheet (NVL column), likewise
    (r"\bH100 PCIe\b",              756e12,   756e12,   378e12),   # NVIDIA H100 data sheet (PCIe column), likewise
    (r"\bH100\b",                   989e12,   989e12,   494e12),   # NVIDIA H100 data sheet (SXM column), likewise
    (r"\bA100\b",                   312e12,   312e12,   156e12),   # NVIDIA A100 data sheet
    (r"\bL40S\b",                   362e12,   362e12,   183e12),   # NVIDIA L40S data sheet
    (r"\bL40\b",                    181e12,   181e12,  90.5e12),   # NVIDIA L40 data sheet
    (r"\bL4\b",                     121e12,   121e12,    60e12),   # NVIDIA L4 data sheet, half of the sparse rates
    (r"\bA10\b",                    125e12,   125e12,  62.5e12),   # NVIDIA A10 data sheet
    (r"\bV100\b",                     None,   125e12,  15.7e12),   # NVIDIA V100 data sheet (SXM2); no bfloat16 units
    (r"\bT4\b",                       None,    65e12,   8.1e12),   # NVIDIA T4 data sheet; no bfloat16 units
    (r"\bTPU v6",                   918e12,     None,   918e12),   # Google Cloud TPU v6e system architecture
    (r"\bTPU v5( ?lite|e)\b",       197e12,     None,   197e12),   # Google Cloud TPU v5e system architecture
    (r"\bTPU v5p?\b",               459e12,     None,   459e12),   # Google Cloud TPU v5p system architecture
    (r"\bTPU v4\b",                 275e12,     None,   275e12),   # Google Cloud TPU v4 system architecture
)
_COLUMNS = {"bfloat16": 1, "float16": 2, "float32": 3}


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that take part in a matmul for every token: the projections of all layers and the output matrix."""
    attention = model.embed_dim * model.head_width * 2 * (model.num_heads + model.kv_heads)
    mlp = model.embed_dim * model.mlp_dim * (3 if model.gated else 2)
    return model.num_layers * (attention + mlp) + model.embed_dim * model.vocab_size


def mean_keys(length: int, window: int | None) -> float:
    """Keys that a query of causal attention needs on average: length / 2, less under a window (W - W**2 / 2L)."""
    if window is None or window >= length:
        return length / 2
    return window - window ** 2 / (2 * length)


def model_flops_per_token(model: ModelConfig, length: int) -> float:
    """FLOPs of forward and backward per token of a sequence of `length` tokens.

    6 * matmul_parameters + 12 * heads * head_dim * (sum over layers of mean_keys): attention makes two matmuls of
    heads * head_dim per key (scores and values), 2 FLOPs each, three times.
    """
    keys = sum(mean_keys(length, window) for window in model.windows())
    return 6.0 * matmul_parameters(model) + 12.0 * model.num_heads * model.head_width * keys


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for matmuls in `dtype`, or None where no vendor's figure is known (CPUs)."""
    for row in _PEAKS:
        if re.search(row[0], device_kind):
            return row[_COLUMNS[dtype]]
    return None
