"""Batches in an order that is a pure function of (seed, step).

Row r of step s is example number s B + r of a sequence of sources (`mixture`) and of each source's epochs; each epoch permutes
all examples and shifts their borders, both from a key of (seed, epoch). A process asks for the rows that it needs, so the global
batch is the same for every number of processes and every mesh, and a resumed run starts at its step without replay.

Grain drives it: a `MapDataset` over steps, whose map assembles a step's rows in one gather, read ahead by Grain's threads.
Grain's element is the batch rather than the example, which keeps Python's cost per example out of the training loop's way.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxlm.data.examples import Examples
from jaxlm.data.mixture import Mixture
from jaxlm.data.order import key, permute

ENDLESS = 2 ** 48                              # steps
BLOCK = 64                                     # steps whose order is computed together, as cheaply as one step's


class Batches:
    """An iterator over this process's rows of each step's batch; read ahead, so close it when done.

    Attributes:
      batch_size: rows of the global batch.
      rows: numbers, in the global batch, of the rows that come out.
    """

    def __init__(self, assemble: Callable[[int], dict[str, np.ndarray]], *, start: int, stop: int, batch_size: int,
                 rows: Sequence[int], prefetch: int, workers: int = 1):
        import grain                           # takes a third of a second
        self.batch_size, self.rows = batch_size, np.asarray(rows, np.int64)
        threads = workers if prefetch else 0
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(prefetch, 2 * threads) if threads else 0)
        self._iterator: Any = None
        if stop > start:
            steps = grain.MapDataset.range(start, stop).map(assemble)
            self._iterator = iter(steps.to_iter_dataset(options))

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def close(self) -> None:
        """Stops reading ahead. The iterator is at its end then."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()


def _check_rows(rows: Sequence[int] | None, batch_size: int) -> np.ndarray:
    out = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)
    if out.size == 0 or out.min() < 0 or out.max() >= batch_size:
        raise ValueError(f"rows {out.tolist()} are not rows of a batch of {batch_size}")
    return out


def train_batches(mixture: Mixture, *, start_step: int = 0, rows: Sequence[int] | None = None, prefetch: int = 4,
                  workers: int = 1) -> Batches:
    """Batches for training.

    Args:
      mixture: the order of the examples.
      start_step: step of the first batch.
      rows: rows of the global batch to read (None: all).
      prefetch: batches read ahead (0: read when asked).
      workers: threads that read ahead.

    Returns:
      An iterator of dicts: inputs, targets int32 [n, L], mask bool [n, L], example int32 [n] (the row's number in the batch), and
      for packed examples positions, segment_ids int32 [n, L].
    """
    batch_size, seed, first, end = mixture.batch_size, mixture.seed, mixture.origin.batch, mixture.end
    chosen = _check_rows(rows, batch_size)

    @functools.lru_cache(maxsize=2 + workers)
    def order_of(block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers = (block * BLOCK + np.arange(BLOCK) - first)[:, None] * batch_size + chosen
        shape, numbers = numbers.shape, numbers.reshape(-1)
        whose, which = mixture.locate(np.maximum(numbers, 0))
        indices, shifts = np.empty_like(which), np.empty_like(which)
        for s, (name, source) in enumerate(zip(mixture.names, mixture.sources)):
            of = f" {name}" if len(mixture.names) > 1 else ""
            mine = whose == s
            epoch, positions = np.divmod(which[mine], len(source))
            indices[mine] = permute(positions, len(source), key(seed, epoch, "order" + of))
            shifts[mine] = (key(seed, epoch, "shift" + of) % np.uint64(source.shifts)).astype(np.int64)
        if end is not None:
            indices[numbers >= end] = max(len(source) for source in mixture.sources)       # past all: without targets
        return whose.reshape(shape), indices.reshape(shape), shifts.reshape(shape)

    def assemble(step: int) -> dict[str, np.ndarray]:
        whose, indices, shifts = (array[step % BLOCK] for array in order_of(step // BLOCK))
        if len(mixture.sources) == 1:
            out = mixture.sources[0].gather(indices, shifts)
        else:
            out = {}
            for s in np.unique(whose):
                mine = whose == s
                for name, array in mixture.sources[s].gather(indices[mine], shifts[mine]).items():
                    out.setdefault(name, np.empty((len(chosen), *array.shape[1:]), array.dtype))[mine] = array
        return {**out, "example": chosen.astype(np.int32)}

    stop = ENDLESS if mixture.batches is None else mixture.batches
    return Batches(assemble, start=start_step, stop=stop, batch_size=batch_size, rows=chosen, prefetch=prefetch, workers=workers)


def eval_batches(examples: Examples, *, batch_size: int, rows: Sequence[int] | None = None, limit: int | None = None,
                 prefetch: int = 4) -> Batches:
    """All examples once, in order; the rows that the last batch has too many are masked out.

    Args:
      limit: stop after so many batches (None: the whole set).
      The others and the result as in `train_batches`.
    """
    chosen = _check_rows(rows, batch_size)

    def assemble(step: int) -> dict[str, np.ndarray]:
        return {**examples.gather(step * batch_size + chosen), "example": chosen.astype(np.int32)}

    steps = -(-len(examples) // batch_size)
    return Batches(assemble, start=0, stop=steps if limit is None else min(steps, limit), batch_size=batch_size, rows=chosen,
                   prefetch=prefetch)
