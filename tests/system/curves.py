"""Loss curves of a configuration on some of the devices, through the real job, step and data."""

import functools
import math

import jax
import numpy as np

from jaxlm.config import Config, to_config
from jaxlm.data import open_data, train_batches
from jaxlm.data.feed import place, rows_of
from jaxlm.job import build_job
from jaxlm.train import compile_train_step
from tests.system import tiny


def config_of(**leaves) -> Config:
    """The tiny configuration with leaves such as `train__steps=3` replaced."""
    config = tiny.get_config()
    for key, value in leaves.items():
        section, name = key.split("__")
        config[section][name] = value
    return to_config(config)


def uneven(batch: dict, step: int) -> dict:
    """The batch with targets masked off, more in later rows, so that shards and microbatches hold different numbers."""
    rng = np.random.default_rng(step)
    share = np.linspace(0.0, 0.8, batch["mask"].shape[0])[:, None]
    return {**batch, "mask": batch["mask"] & (rng.random(batch["mask"].shape) >= share)}


def renumbered(batch: dict, vocab_size: int) -> dict:
    """The batch with its ids dealt out over the vocabulary. Bytes of English are all in the lower half, and so in one shard."""
    assert math.gcd(5, vocab_size) == 1
    return {**batch, **{name: batch[name] * 5 % vocab_size for name in ("inputs", "targets")}}


class Telling:
    """`uneven` and `renumbered` batches, for a feed."""

    def __init__(self, batches, vocab_size: int):
        self.batches, self.rows, self.batch_size, self.vocab_size = batches, batches.rows, batches.batch_size, vocab_size
        self.step = 0

    def __next__(self):
        self.step += 1
        return uneven(renumbered(next(self.batches), self.vocab_size), self.step)

    def close(self):
        self.batches.close()


def curve(config: Config, num_devices: int, steps: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """(loss, gradient norm) of each step, float64 [steps]."""
    job = build_job(config, num_devices).on_devices(jax.devices()[:num_devices])
    train_step = compile_train_step(job)
    state = job.initialise()
    data = open_data(config.data, config.model.vocab_size)
    shardings = job.batch_shardings()
    size = config.train.global_batch_size
    batches = train_batches(data.mixture(size, 0), rows=rows_of(shardings["inputs"], size))
    rows = []
    with place(Telling(batches, config.model.vocab_size), shardings) as feed:
        for _ in range(steps):
            state, metrics = train_step(state, next(feed))
            rows.append((metrics["loss"], metrics["grad_norm"]))
            jax.block_until_ready(state)  # simulated devices share a few threads; steps that pile up can starve each other
    loss, norm = np.array(jax.device_get(rows), np.float64).T
    return loss, norm


@functools.cache
def one_device(**leaves) -> tuple[np.ndarray, np.ndarray]:
    """`curve` of one device, the reference; computed once."""
    return curve(config_of(**leaves, mesh__data=1), 1)


def compare(ours, reference) -> dict[str, float]:
    """How far a curve is from another: largest and mean difference of the loss, largest relative difference of the norm."""
    difference = ours[0] - reference[0]
    return {"loss": float(np.abs(difference).max()), "mean": float(abs(difference.mean())),
            "norm": float(np.abs(ours[1] / reference[1] - 1).max())}


def is_equal(figures: dict[str, float]) -> bool:
    """The bounds of one equivalence class in float32."""
    return figures["loss"] <= 1e-5 and figures["mean"] <= 1e-6 and figures["norm"] <= 1e-4
