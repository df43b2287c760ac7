"""Batches arrive on devices ahead of time, laid out as declared; errors and ends arrive too."""

import gc
import itertools
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxlm.data import Examples, eval_batches, train_batches
from jaxlm.data.feed import place, rows_of
from jaxlm.data.mixture import alone
from partitioning.declaration import DeclarationError

EXAMPLES = Examples.ring(np.arange(500, dtype=np.uint16), 8, 500)


def shardings(rows=("data", "fsdp"), length="tensor"):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    wide, narrow = NamedSharding(mesh, P(rows, length)), NamedSharding(mesh, P(rows))
    return {"inputs": wide, "targets": wide, "mask": wide, "example": narrow}


class Source:
    """Batches made by a function of the step."""
    batch_size, rows = 8, np.arange(8)

    def __init__(self, make):
        self.steps, self.make, self.closed = itertools.count(), make, False

    def __next__(self):
        return self.make(next(self.steps))

    def close(self):
        self.closed = True


def ones(step):
    return {"example": np.full(8, step, np.int32)}


@pytest.mark.parametrize("rows, length", [(("data", "fsdp"), None), (("data", "fsdp"), "tensor"), ("data", "fsdp"), (None, None)])
def test_batches_are_global_arrays_with_the_declared_shardings(rows, length):
    layout = shardings(rows, length)
    assert rows_of(layout["inputs"], 8).tolist() == list(range(8))
    expected = train_batches(alone(EXAMPLES, 8, 1))
    with place(train_batches(alone(EXAMPLES, 8, 1)), layout) as feed:
        for want, batch in itertools.islice(zip(expected, feed), 3):
            for name, array in batch.items():
                assert array.sharding == layout[name] and array.dtype == want[name].dtype
                np.testing.assert_array_equal(np.asarray(array), want[name])
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), want[name][shard.index])
    expected.close()


def test_a_batch_that_the_devices_cannot_divide_is_refused_with_the_numbers():
    with pytest.raises(DeclarationError, match="batch of 6 .* 4 groups .*data, fsdp.*: 4, 8"):
        rows_of(shardings()["inputs"], 6)


def test_the_end_comes_once_for_all():
    examples = Examples.line(0, np.arange(100, dtype=np.uint16), 8, 100)
    with place(eval_batches(examples, batch_size=8), shardings()) as feed:
        assert sum(int(batch["mask"].sum()) for batch in feed) == 100
        assert list(feed) == []


def test_an_error_reaches_the_consumer_in_its_place_and_stays():
    def fail_at_two(step):
        if step == 2:
            raise OSError("disk gone")
        return ones(step)
    with place(Source(fail_at_two), shardings()) as feed:
        assert [int(next(feed)["example"][0]) for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                next(feed)


def test_no_more_than_depth_batches_are_made_ahead():
    made, enough = [], threading.Event()
    def make(step):
        made.append(step)
        if len(made) >= 4:
            enough.set()
        return ones(step)
    with place(Source(make), shardings(), depth=3) as feed:
        assert not enough.wait(0.3) and made == [0, 1, 2]
        next(feed)
        assert enough.wait(30)


def wait_until_full(feed, depth=2):
    """The feed's thread has nothing to do until a batch is taken."""
    end = time.monotonic() + 30
    while feed._ready.qsize() < depth and time.monotonic() < end:
        time.sleep(0.01)


def test_closing_stops_the_thread_and_the_batches():
    source = Source(ones)
    feed = place(source, shardings())
    thread = feed._thread
    wait_until_full(feed)
    feed.close()
    feed.close()
    assert not thread.is_alive() and source.closed
    with pytest.raises(ValueError, match="closed"):
        next(feed)


def test_dropping_the_feed_is_enough_to_stop_it():
    feed = place(Source(ones), shardings())
    thread, gone = feed._thread, weakref.ref(feed)
    wait_until_full(feed)
    del feed
    gc.collect()
    assert gone() is None and not thread.is_alive()


def test_the_consumers_wait_is_counted_and_nothing_else():
    ready = threading.Event()
    def slow_first(step):
        if step == 0:
            ready.wait(30)
        return ones(step)
    with place(Source(slow_first), shardings()) as feed:
        threading.Timer(0.2, ready.set).start()
        next(feed)
        assert feed.wait_seconds == feed.last_wait_seconds > 0.1
        first = feed.wait_seconds
        next(feed)
        assert feed.wait_seconds == first + feed.last_wait_seconds


PROCESS = """
import sys
import jax, numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxlm.data import Examples, train_batches
from jaxlm.data.feed import place, rows_of
from jaxlm.data.mixture import BLOCK, Mixture, alone
from jaxlm.data.packing import pack
from jaxlm.data.streams import Stream
tokens = np.arange(500, dtype=np.uint16)
packed = [pack(Stream((tokens,), np.append(np.arange(n, 500, n), 500)), 8, None, 0, 0) for n in (3, 7)]
two = Mixture(("a", "b"), tuple(packed), ((0, (BLOCK // 2, BLOCK // 2)),), 8, 1, epochs=1)
orders = alone(Examples.ring(tokens, 8, 500), 8, 1, 1), two
mesh = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("data", "tensor"))     # both processes hold each of the 4 groups of rows
for axes, count in (("data", 8), ("tensor", 4), (("tensor", "data"), 4)):
    wide, narrow = NamedSharding(mesh, P(axes)), NamedSharding(mesh, P(axes))
    rows = rows_of(wide, 8)
    assert len(rows) == count, rows
    for order in orders:
        whole = list(train_batches(order))
        layout = {name: wide if array.ndim == 2 else narrow for name, array in whole[0].items()}
        with place(train_batches(order, rows=rows), layout) as feed:
            found = list(feed)
        assert len(found) == len(whole) > 5, "both processes end together"
        for one, batch in zip(whole, found):
            assert one.keys() == batch.keys()
            for name, array in batch.items():
                assert array.shape == one[name].shape
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), one[name][shard.index])
print("good")
"""


def test_two_processes_read_their_own_rows_of_the_same_batches():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    root = pathlib.Path(__file__).parents[3]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, address, str(i)], env=env, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT) for i in range(2)]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0 and out.strip().endswith("good"), out
    finally:
        for process in processes:
            process.kill()
