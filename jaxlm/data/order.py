"""The order of examples: a keyed permutation that is computed, not stored.

Position p of epoch e holds example `permute(p, n, key(seed, e))`, so any process finds any step's examples from (seed, step)
alone: no state, no replay, no memory, whatever the number of examples.

The permutation is an alternating Feistel network over the smallest power of two that holds n (Luby and Rackoff 1988, "How to
construct pseudorandom permutations from pseudorandom functions"), walked in cycles until it lands below n (Black and Rogaway
2002, "Ciphers with arbitrary finite domains"). Its round function is the finaliser of splitmix64 (Steele, Lea and Flood 2014,
"Fast splittable pseudorandom number generators").

It is spelt out here rather than borrowed, because an order must stay the same for as long as checkpoints live, and because it
must be a real permutation: Grain 0.2's shuffle (four rounds of a lighter network) correlates neighbours and epochs at some sizes,
65,536 examples among them.
"""

import functools
import hashlib

import numpy as np

ROUNDS = 6
SMALLEST_BITS = 6                              # small networks permute badly; walking from 64 costs little
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words whose output bits each depend on all input bits. uint64 [...] to uint64 [...]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(seed: int, numbers: np.ndarray, purpose: str) -> np.ndarray:
    """A 64-bit word for each of `numbers` (epochs), unrelated between seeds, numbers and purposes. int64 [n] to uint64 [n]."""
    return mix(mix(np.asarray(numbers, np.uint64) + GOLDEN) ^ _word(seed, purpose))


@functools.lru_cache
def _word(seed: int, purpose: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:8], "little"))


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where a permutation of 0..size-1 sends `positions`, for each position the permutation of its key.

    Args:
      positions: int64 [n], each in [0, size).
      size: numbers permuted, below 2**62.
      keys: uint64 [n].

    Returns:
      int64 [n].
    """
    bits = max(int(size - 1).bit_length(), SMALLEST_BITS)
    low = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    round_keys = mix(keys + np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None] * GOLDEN)

    def network(x):
        high, right = x >> low, x & low_mask
        for r in range(0, ROUNDS, 2):
            high = high ^ (mix(right ^ round_keys[r]) & high_mask)
            right = right ^ (mix(high ^ round_keys[r + 1]) & low_mask)
        return high << low | right

    out = network(np.asarray(positions, np.uint64))
    while (beyond := out >= size).any():
        out = np.where(beyond, network(out), out)
    return out.astype(np.int64)
