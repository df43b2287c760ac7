"""Text from a model: one prompt in, one token at a time out, with a cache of keys and values."""

import dataclasses
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import LARGEST_SEED
from jaxlm.in_flight import InFlight
from partitioning import resolve
from partitioning.declaration import DeclarationError


def choose(logits_V: jax.Array, key: jax.Array, *, temperature: float, top_k: int | None, top_p: float | None) -> jax.Array:
    """Draws a token id from float32 logits.

    Temperature 0 takes the likeliest. `top_k` keeps the k likeliest; `top_p` keeps the likeliest ids whose probabilities
    first add up to p (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751). Both may be given: top_k comes first.
    """
    if temperature == 0:
        return jnp.argmax(logits_V)
    logits_V = (logits_V - jnp.max(logits_V)) / temperature  # so that no temperature makes an infinity of the likeliest
    order_V = jnp.argsort(-logits_V)
    sorted_V = logits_V[order_V]
    if top_k is not None:
        sorted_V = jnp.where(jnp.arange(sorted_V.size) < top_k, sorted_V, -jnp.inf)
    if top_p is not None:
        share_V = jax.nn.softmax(sorted_V)
        before_V = jnp.cumsum(share_V) - share_V       # what the likelier ids hold already
        sorted_V = jnp.where(before_V < top_p, sorted_V, -jnp.inf)
    return order_V[jax.random.categorical(key, sorted_V)]


def generation_layout(job: Any) -> Any:
    """The job's layout for one prompt: parameters as they are, activations not split along batch or length."""
    sharding = job.config.sharding
    rules = {**sharding.activations.get("rules", {}), "batch": None, "length": None, "stream_length": None}
    sharding = dataclasses.replace(sharding, activations={**sharding.activations, "rules": rules})
    layout = resolve(job.layout.sizes, sharding, job.model.specs, job.optimizer.specs, job.model.activations(1, 1))
    return layout.on(job.mesh)


def check_sampling(
    *, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int = 0
) -> None:
    """Raises DeclarationError for a sampling flag out of range."""
    for flag, value, fits, expected in (
            ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
            ("temperature", temperature, 0 <= temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
            ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
            ("seed", seed, 0 <= seed <= LARGEST_SEED, f"0 to {LARGEST_SEED}")):
        if not fits:
            raise DeclarationError(f"--{flag}={value}; expected {expected}.")


class Sampler:
    """Generates from one model; compiles once for all prompts of one (padded) length."""

    def __init__(self, model: Any, layout: Any):
        self._model = model
        self._layout = layout
        self._step = jax.jit(self._decode, static_argnames=("temperature", "top_k", "top_p"), donate_argnums=3)

    def _decode(self, params, tokens_1T, length, cache, key, *, temperature, top_k, top_p):
        """Feeds `length` of T tokens and draws the next; keys of steps differ by the cache's position."""
        logits_1TV, cache = self._model.decode(params, tokens_1T, cache, length=length, shard=self._layout)
        logits_V = jnp.take(logits_1TV[0], length - 1, axis=0)
        return choose(logits_V, key, temperature=temperature, top_k=top_k, top_p=top_p), cache

    def generate(self, params: Any, prompt: Sequence[int], *, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None, top_p: float | None = None, seed: int = 0,
                 ends: Collection[int] = ()) -> Iterator[int]:
        """Yields token ids until `max_new_tokens`, one of the ids `ends` (not yielded) or the model's longest sequence.

        The ids are a pure function of the parameters, the prompt, the seed and the sampling rule.
        """
        prompt = list(prompt)
        longest = self._model.config.max_positions
        if not prompt:
            raise DeclarationError("the prompt is empty; give at least one token.")
        if len(prompt) >= longest:
            raise DeclarationError(f"the prompt has {len(prompt)} tokens, but the model's longest sequence is {longest} "
                                   "(config.model.max_positions); shorten it.")
        count = min(max_new_tokens, longest - len(prompt))
        padded = min(_bucket(len(prompt)), longest)
        cache = self._model.init_cache(1, min(_bucket(padded + count), longest))
        key = jax.random.key(seed)
        tokens_1T = jnp.asarray([prompt + [0] * (padded - len(prompt))], jnp.int32)
        length, in_flight = len(prompt), InFlight()
        for i in range(count):
            token, cache = self._step(params, tokens_1T, jnp.int32(length), cache, jax.random.fold_in(key, i),
                                      temperature=temperature, top_k=top_k, top_p=top_p)
            token = int(in_flight.add(token))
            if token in ends:
                return
            yield token
            if i == count - 1 and count < max_new_tokens:
                print(f"\nstopped: the model's longest sequence is {longest} (config.model.max_positions)", file=sys.stderr)
            tokens_1T, length = jnp.full((1, 1), token, jnp.int32), 1


def _bucket(length: int) -> int:
    """The next power of two from 16 on: few lengths, few compiles."""
    return max(16, 1 << (length - 1).bit_length())
