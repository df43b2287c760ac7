"""Batches on devices before they are needed.

A thread takes batches from an iterator, makes each a set of global arrays (every process contributes the rows that its devices
hold) and keeps a few of them waiting, so that a training step never waits for the host. How long it did wait is counted, for the
logs.
"""

import queue
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.data.batches import Batches
from partitioning.declaration import DeclarationError


def rows_of(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """The rows of a batch that this process's devices hold: int64 [n], ascending.

    Args:
      sharding: of an array whose leading dim is the batch.

    Raises:
      DeclarationError: the batch cannot be divided over the devices.
    """
    spec = PartitionSpec(sharding.spec[0] if len(sharding.spec) else None)
    over_rows = NamedSharding(sharding.mesh, spec)
    axes = (spec[0],) if isinstance(spec[0], str) else tuple(spec[0] or ())
    ways = int(np.prod([sharding.mesh.shape[axis] for axis in axes]))
    if batch_size % ways:
        nearby = (batch_size // ways * ways or ways, (batch_size // ways + 1) * ways)
        raise DeclarationError(f"a batch of {batch_size} rows cannot be divided over {ways} groups of devices (mesh axes "
                               f"{', '.join(axes)}); sizes that can: {', '.join(str(n) for n in sorted(set(nearby)))}.")
    indices = over_rows.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices]))


def place(batches: Batches, shardings: Mapping[str, NamedSharding], *, depth: int = 2) -> "Feed":
    """Starts putting `batches` on devices, `depth` ahead.

    Args:
      batches: this process's rows of each batch: those of `rows_of`.
      shardings: array name to sharding, for every array of a batch.

    Returns:
      An iterator of dicts of global arrays [batch_size, ...]. It owns `batches` and closes it.
    """
    return Feed(batches, shardings, depth)


class Feed:
    """An iterator of batches on devices, a context manager, and the measure of its consumer's patience.

    Attributes:
      wait_seconds: seconds that all calls of `next` so far have waited, together.
      last_wait_seconds: seconds that the last call waited.
    """

    def __init__(self, batches: Batches, shardings: Mapping[str, NamedSharding], depth: int):
        self.wait_seconds = self.last_wait_seconds = 0.0
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stop = threading.Event()
        # The thread must not hold this object, so that dropping it is enough to end the thread.
        self._thread = threading.Thread(target=_fill, args=(batches, dict(shardings), self._ready, self._room, self._stop),
                                        name="feed", daemon=True)
        self._finalizer = weakref.finalize(self, _end, batches, self._thread, self._room, self._stop)
        self._error: BaseException | None = None
        self._thread.start()

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> dict[str, jax.Array]:
        if self._error is not None:
            raise self._error
        if not self._finalizer.alive:
            raise ValueError("the feed is closed")
        start = time.perf_counter()
        batch = self._ready.get()
        self.last_wait_seconds = time.perf_counter() - start
        self.wait_seconds += self.last_wait_seconds
        self._room.release()
        if isinstance(batch, BaseException):
            self._error = batch                # the end, and errors, stay
            raise batch
        return batch

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and closes the batches; may be called twice."""
        self._finalizer()


def _fill(batches: Batches, shardings: dict[str, NamedSharding], ready: queue.SimpleQueue, room: threading.Semaphore,
          stop: threading.Event) -> None:
    """The thread: makes room its own, then a batch, until told to stop. What goes wrong is handed on in place of a batch."""
    try:
        while room.acquire() and not stop.is_set():
            ready.put(on_devices(next(batches), shardings, batches.rows, batches.batch_size))
    except BaseException as error:             # StopIteration too: it ends the consumer's loop
        ready.put(error)


def _end(batches: Batches, thread: threading.Thread, room: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    room.release()
    if thread is not threading.current_thread():
        thread.join(timeout=10)
    batches.close()


def on_devices(batch: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding], rows: np.ndarray,
               batch_size: int) -> dict[str, jax.Array]:
    """Global arrays [batch_size, ...] from this process's rows.

    Args:
      batch: arrays [n, ...].
      rows: int64 [n], ascending: which rows of the global arrays they are. It holds every row of this process's devices.
    """
    def globally(name: str, array: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(batch_size)
            begin = int(np.searchsorted(rows, first))
            return array[(slice(begin, begin + last - first), *index[1:])]
        return jax.make_array_from_callback((batch_size, *array.shape[1:]), shardings[name], piece)

    return {name: globally(name, array) for name, array in batch.items()}
