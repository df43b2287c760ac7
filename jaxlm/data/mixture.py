"""Several sources, each with its share of the examples, in an order that is computed from (seed, number) alone.

The endless sequence of examples is cut into blocks of BLOCK. In every block each source has its quota, the share rounded to
1 / BLOCK, and a keyed permutation says which places are whose. So the shares are exact in every block, and how many
examples of a source come before a number is known without counting: full blocks times the quota, and a look at one block. Source
s's examples come in that source's own order, epoch by epoch, each once in an epoch, whatever the others do.

Weights may change at declared steps (stages): blocks begin anew there, and every source goes on where it was. A run that goes on
with other weights after a stop is the same thing, its `Origin` a stage that was not declared beforehand.

One source alone is a mixture without blocks.
"""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.data.order import key, permute
from partitioning.declaration import DeclarationError, nearest

BLOCK = 1 << 14


@dataclasses.dataclass(frozen=True)
class Source:
    """One declared source. `weight` None: its size. `weights` of the stages are looked up by name."""

    name: str
    paths: tuple[str, ...]
    weight: float | None = None


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the order is counted from: batch `batch` was the first of it, and source s had given `taken[s]` examples before.
    `taken` empty: none. `gone`: of sources that went, (name, taken, examples, sha256), for when they come again."""

    batch: int = 0
    taken: tuple[int, ...] = ()
    gone: tuple[tuple[str, int, int, str], ...] = ()


def declared_sources(train: Sequence[Any]) -> list[Source]:
    """The sources of config.data.train: one for names alone, several for dicts.

    Raises:
      DeclarationError: something else, or names that are not distinct.
    """
    key = "config.data.train"
    if all(isinstance(item, str) for item in train):
        return [Source("train", tuple(train))]
    out = []
    for i, item in enumerate(train):
        place = f"{key}[{i}]"
        if not isinstance(item, Mapping):
            raise DeclarationError(
                f"{place} = {item!r} stands beside dicts; of a mixture every source is a dict(paths=..., weight=...)."
            )
        for word in item:
            if word not in ("paths", "name", "weight"):
                raise DeclarationError(f"unknown key {place}.{word}: {nearest(word, ('paths', 'name', 'weight'), 'key')}")
        paths = item.get("paths", ())
        paths = (paths,) if isinstance(paths, str) else tuple(paths) if isinstance(paths, (tuple, list)) else ()
        if not paths or not all(isinstance(path, str) for path in paths):
            raise DeclarationError(f"{place}.paths = {item.get('paths')!r}; expected a path, glob or URL, or several.")
        weight = item.get("weight")
        if weight is not None and not _is_weight(weight):
            raise DeclarationError(f"{place}.weight = {weight!r}; expected a number of at least 0.")
        out.append(Source(str(item.get("name", paths[0])), paths, weight))
    names = [source.name for source in out]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DeclarationError(f"{key} has two sources of the name {twice!r}; give each a name of its own.")
    weights = [source.weight for source in out]
    if any(w is None for w in weights) and any(w is not None for w in weights):
        raise DeclarationError(f"{key}: some sources have a weight and some have none; give all or none of them one.")
    return out


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def declared_stages(stages: Sequence[Any], names: Sequence[str]) -> list[tuple[int, list[float]]]:
    """(step, weights in the order of `names`) of config.data.stages, ascending.

    Raises:
      DeclarationError: they are not pairs, not ascending, or their names are not those of the sources.
    """
    out, key = [], "config.data.stages"
    for i, pair in enumerate(stages):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], int) and isinstance(pair[1], Mapping)):
            raise DeclarationError(f"{key}[{i}] = {pair!r}; expected a pair such as (1000, dict(web=0.5, books=0.5)).")
        step, weights = pair
        for name, weight in weights.items():
            if name not in names:
                raise DeclarationError(f"{key}[{i}] names no source {name!r}; {nearest(name, names, 'source')}")
            if not _is_weight(weight):
                raise DeclarationError(f"{key}[{i}]: the weight of {name!r} is {weight!r}; expected a number of at least 0.")
        if step <= (out[-1][0] if out else 0):
            raise DeclarationError(f"{key}[{i}] is at step {step}; steps must be above 0 and ascend.")
        out.append((step, [float(weights.get(name, 0)) for name in names]))
    if out and len(names) < 2:
        raise DeclarationError(f"{key} is for mixtures; declare sources as dicts in config.data.train.")
    return out


def quotas_of(weights: Sequence[float], temperature: float, names: Sequence[str], key: str) -> tuple[int, ...]:
    """Examples of each source in a block: shares proportional to weight ** (1 / temperature), rounded so that they add up.

    Raises:
      DeclarationError: no weight is above 0, or one is too small to be had once in a block.
    """
    top = max(weights)
    if top <= 0:
        raise DeclarationError(f"{key}: no source has a weight above 0.")
    powers = np.array([(w / top) ** (1 / temperature) if w else 0.0 for w in weights])
    exact = powers / powers.sum() * BLOCK
    quotas = np.floor(exact).astype(np.int64)
    for i in np.argsort(-(exact - quotas), kind="stable")[: BLOCK - int(quotas.sum())]:
        quotas[i] += 1
    for name, weight, quota in zip(names, weights, quotas.tolist()):
        if weight and not quota:
            raise DeclarationError(f"{key}: the share of {name!r} is below 1 in {BLOCK:,}; raise its weight, or leave it out.")
    return tuple(quotas.tolist())


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The order of a training run's examples.

    Attributes:
      names, sources: of each source its name and its examples.
      stages: (first batch, quotas) ascending, the first at 0; one pair of no meaning for a source alone.
      batch_size: examples of a batch.
      seed: of the order.
      origin: where this order is counted from.
      epochs: passes over a source after which the order ends; None: never.
    """

    names: tuple[str, ...]
    sources: tuple[Any, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    batch_size: int
    seed: int
    origin: Origin = Origin()
    epochs: int | None = None

    @functools.cached_property
    def _begun(self) -> list[tuple[int, tuple[int, ...], np.ndarray]]:
        """Of each stage from the origin on: its first number, its quotas, and what each source had given before it."""
        taken = np.array(self.origin.taken or [0] * len(self.sources), np.int64)
        last = max(i for i, (batch, _) in enumerate(self.stages) if batch <= max(self.origin.batch, 0))
        out = [(0, self.stages[last][1], taken)]
        for batch, quotas in self.stages[last + 1 :]:
            number = (batch - self.origin.batch) * self.batch_size
            taken = taken + self._within(len(out) - 1, out[-1][1], number - out[-1][0])
            out.append((number, quotas, taken))
        return out

    def _within(self, stage: int, quotas: tuple[int, ...], count: int) -> np.ndarray:
        """Examples of each source among the first `count` of a stage."""
        if len(self.sources) == 1:
            return np.array([count], np.int64)
        blocks, rest = divmod(count, BLOCK)
        whose = self._block(stage, quotas, blocks)[0][:rest]
        return blocks * np.array(quotas, np.int64) + np.bincount(whose, minlength=len(quotas))

    @functools.lru_cache(maxsize=8)  # of a frozen object that lives as long as the run
    def _block(self, stage: int, quotas: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
        """Whose each place of a block is, and how many of the same source come before it in the block: int64 [BLOCK] both."""
        keys = key(self.seed, np.array([(self.origin.batch << 20) + stage]), "mixture") ^ key(
            self.seed, np.array([block]), "block"
        )
        drawn = permute(np.arange(BLOCK), BLOCK, np.repeat(keys, BLOCK))
        whose = np.searchsorted(np.cumsum(quotas), drawn, side="right")
        order = np.argsort(whose, kind="stable")
        before = np.empty(BLOCK, np.int64)
        before[order] = np.arange(BLOCK) - np.repeat(np.cumsum(quotas) - quotas, quotas)
        return whose, before

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which source each example of the order is of, and its number among that source's: int64 [n] both.

        Args:
          numbers: int64 [n], counted from the origin's first example.
        """
        if len(self.sources) == 1:
            return np.zeros(len(numbers), np.int64), numbers + self._begun[0][2][0]
        whose, which = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        stages = np.searchsorted([number for number, _, _ in self._begun], numbers, side="right") - 1
        blocks, places = np.divmod(numbers - np.array([number for number, _, _ in self._begun])[stages], BLOCK)
        for stage, block in sorted(set(zip(stages.tolist(), blocks.tolist()))):
            chosen = (stages == stage) & (blocks == block)
            _, quotas, taken = self._begun[stage]
            owners, before = self._block(stage, quotas, block)
            whose[chosen] = owners[places[chosen]]
            which[chosen] = before[places[chosen]] + taken[whose[chosen]] + block * np.array(quotas)[whose[chosen]]
        return whose, which

    def taken(self, batch: int) -> tuple[int, ...]:
        """How many examples of each source the batches before `batch` hold, those before the origin included."""
        number = max(batch - self.origin.batch, 0) * self.batch_size
        number = number if self.end is None else min(number, self.end)
        stage = max(i for i, (first, _, _) in enumerate(self._begun) if first <= number)
        first, quotas, taken = self._begun[stage]
        return tuple((taken + self._within(stage, quotas, number - first)).tolist())

    def shares(self, batch: int) -> dict[str, float]:
        """The share of each source in all examples before `batch`; of a mixture only."""
        taken = self.taken(batch)
        return {name: count / max(sum(taken), 1) for name, count in zip(self.names, taken)} if len(taken) > 1 else {}

    @functools.cached_property
    def end(self) -> int | None:
        """The number of the first example that there is none of, because a source has been passed `epochs` times; None: endless.

        Where sources run out at different places, the first one ends it: the shares hold up to the end.
        """
        if self.epochs is None:
            return None
        limits = np.array([self.epochs * len(source) for source in self.sources])
        if len(self.sources) == 1:
            return max(int(limits[0] - self._begun[0][2][0]), 0)
        for stage, (first, quotas, taken) in enumerate(self._begun):
            last = self._begun[stage + 1][0] if stage + 1 < len(self._begun) else None
            left = np.maximum(limits - taken, 0)
            used = np.array(quotas) > 0
            block = int((left[used] // np.array(quotas)[used]).min())
            whose, before = self._block(stage, quotas, block)
            out = np.flatnonzero(before + block * np.array(quotas)[whose] >= left[whose])
            number = first + block * BLOCK + (int(out[0]) if len(out) else BLOCK)
            if last is None or number < last:
                return number
        raise AssertionError("the last stage has no end")

    @property
    def batches(self) -> int | None:
        """The number of batches there are, all told; the last of them may be partly empty. None: endless."""
        return None if self.end is None else self.origin.batch + -(-self.end // self.batch_size)


def alone(examples: Any, batch_size: int, seed: int, epochs: int | None = None) -> Mixture:
    """The order of one source's examples."""
    return Mixture(("train",), (examples,), ((0, (BLOCK,)),), batch_size, seed, epochs=epochs)
