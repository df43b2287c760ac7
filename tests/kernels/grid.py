"""Calls of attention to compare with float64: a grid of shapes and masks, and a small part of it that leaves out no pair."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import attention
from tests.kernels import oracle

LENGTHS = ((1, 1), (63, 63), (64, 64), (65, 65), (200, 200), (257, 257), (65, 200), (200, 63))
WIDTHS = (40, 64, 80, 96, 128, 256)
GROUPS = (1, 4, 8)                             # query heads to a key head
PACKED = ((3, 4), (1, 3), (2, 2), (0, 1))      # (segment id, tenths of the length)
PIECES = ((1, 3), (2, 3), (1, 3), (-1, 1))     # a segment in two pieces
# What a mask or the scores may have, and which of these exclude each other.
FEATURES = {"places": {"full": dict(causal=False), "window": dict(window=33)}, "ids": {"packed": PACKED, "pieces": PIECES},
            "cap": {"cap": 2.0}, "sinks": {"sinks": True}, "later": {"later": 40}}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, and the features' names."""
    lengths: tuple[int, int]
    width: int
    group: int
    features: tuple[str, ...]
    value_width: int | None = None

    def __str__(self):
        sizes = f"{self.lengths[0]}x{self.lengths[1]}, {self.width} wide, {self.group} to one"
        return f"{sizes}, {'+'.join(self.features) or 'causal'}"

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        """q, k, v, the cotangents, and sinks."""
        rng, (T, S), H = np.random.default_rng(seed), self.lengths, max(2, self.group)
        V = self.value_width or self.width
        shapes = {"q": (1, T, H, self.width), "k": (1, S, H // self.group, self.width), "v": (1, S, H // self.group, V),
                  "d_out": (1, T, H, V), "d_lse": (1, H, T), "sinks": (H,)}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def options(self) -> dict:
        """Arguments of `attention` besides arrays of floats."""
        chosen = {kind: value for kind, values in FEATURES.items() for name, value in values.items() if name in self.features}
        out = dict(chosen.get("places", {}))
        if "ids" in chosen:
            T, S = self.lengths
            out |= dict(q_segment_ids_BT=ids(chosen["ids"], T), k_segment_ids_BS=ids(chosen["ids"], S))
        return out | {name: chosen[key] for key, name in (("cap", "softcap"), ("later", "query_offset")) if key in chosen}


def ids(pattern, length: int) -> np.ndarray:
    """Segment ids [1, length]."""
    counts = [share * length // 10 for _, share in pattern]
    counts[-1] += length - sum(counts)
    return np.repeat([name for name, _ in pattern], counts).astype(np.int32)[None]


def whole() -> list[Case]:
    """Every length with every width and every pair of features; the groups go round, so that every three of length, width, group
    and pair occur but for width and length with one group each."""
    names = [(kind, name) for kind, values in FEATURES.items() for name in values]
    pairs = [(), *((name,) for _, name in names),
             *((a[1], b[1]) for a, b in itertools.combinations(names, 2) if a[0] != b[0])]
    return [Case(lengths, width, GROUPS[(i + j + n) % len(GROUPS)], pair, 72 if (i + n) % 3 == 0 else None)
            for i, lengths in enumerate(LENGTHS) for j, width in enumerate(WIDTHS) for n, pair in enumerate(pairs)]


def covering() -> list[Case]:
    """Few cases, in which every pair of features, and of a size and a feature occurs; of sizes `whole` has them all."""
    choices = [LENGTHS, WIDTHS, GROUPS, (None, 72), *((None, *values) for values in FEATURES.values())]
    missing = {pair for (i, a), (j, b) in itertools.combinations(enumerate(choices), 2) if j > 2
               for pair in itertools.product(((i, x) for x in a), ((j, y) for y in b))}
    rng, out = np.random.default_rng(0), []
    while missing:
        (i, x), (j, y) = min(missing, key=str)
        rows = [[values[rng.integers(len(values))] for values in choices] for _ in range(200)]
        for row in rows:
            row[i], row[j] = x, y
        best = max(rows, key=lambda row: len(missing & set(_pairs(row))))
        missing -= set(_pairs(best))
        out.append(Case(*best[:3], tuple(name for name in best[4:] if name), best[3]))
    return out


def _pairs(row) -> Iterator:
    return itertools.combinations(enumerate(row), 2)


def errors(case: Case, backend: str, interpret: bool = False) -> dict[str, float]:
    """The largest error of each result and gradient, relative where a value is above 1. Infinite where other queries than float64
    says see nothing, or where a second run has other bits."""
    arrays, options = case.arrays(), case.options()
    d_out, d_lse = arrays.pop("d_out"), arrays.pop("d_lse")
    if "sinks" not in case.features:
        del arrays["sinks"]

    def loss(given):
        out, lse = attention(given["q"], given["k"], given["v"], sinks_H=given.get("sinks"), return_lse=True, backend=backend,
                             interpret=interpret, **options)
        return jnp.sum(out * d_out) + jnp.sum(jnp.where(lse > -jnp.inf, lse * d_lse, 0)), (out, lse)

    fast = {"xla_backend_optimization_level": 0} if interpret else {}          # to compile: it is run only twice
    step = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(arrays).compile(compiler_options=fast)
    (_, (out, lse)), gradients = first = jax.device_get(step(arrays))
    same = jax.tree.map(np.array_equal, first, jax.device_get(step(arrays)))
    answer = oracle.attend(arrays["q"], arrays["k"], arrays["v"], d_out, d_lse, sinks=arrays.get("sinks"), **options)
    found = {"out": out, "lse": lse} | {f"d_{name}": gradient for name, gradient in gradients.items()}
    return {name: _error(got, getattr(answer, name)) if all(jax.tree.leaves(same)) else np.inf for name, got in found.items()}


def _error(got, want) -> float:
    seen = np.isfinite(want)
    if got.shape != want.shape or not np.array_equal(np.isfinite(got), seen):
        return np.inf
    return float(np.max(np.abs(got[seen] - want[seen]) / np.maximum(1, np.abs(want[seen])), initial=0.0))


def is_right(errors: dict[str, float]) -> bool:
    """Float32's bounds."""
    return all(error <= (1e-4 if name.startswith("d_") else 1e-5) for name, error in errors.items())
