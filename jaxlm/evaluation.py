"""Evaluation: the whole evaluation text once, every target scored exactly once."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jaxlm.data import eval_batches
from jaxlm.data.feed import place, rows_of
from jaxlm.in_flight import InFlight
from jaxlm.job import Job


def make_evaluate(job: Job, examples: Any) -> Callable[[Any], dict[str, float]]:
    """A function of the parameters that gives the loss on `examples`. It compiles when it is first called.

    Returns of that function: eval_loss (nats per target token), eval_perplexity, eval_bits_per_byte (where the text's
    bytes are known), eval_targets.
    """
    train, layout = job.config.train, job.layout
    batch_size = train.global_batch_size // train.gradient_accumulation   # the shape whose sharding has been checked
    shardings = job.batch_shardings()

    @jax.jit
    def score(params, batch):
        sums = job.model.loss(params, batch, shard=layout)
        return sums.loss, sums.targets

    def evaluate(params) -> dict[str, float]:
        batches = eval_batches(examples, batch_size=batch_size, rows=rows_of(shardings["inputs"], batch_size),
                               limit=train.eval_steps)
        in_flight = InFlight()
        with place(batches, shardings) as feed:
            pairs = [in_flight.add(score(params, batch)) for batch in feed]
        pairs = jax.device_get(pairs)                  # one wait at the end, sums in the host's float64
        loss_sum, targets = (math.fsum(float(pair[i]) for pair in pairs) for i in (0, 1))
        return summary(loss_sum, targets, examples.bytes_per_target)

    return evaluate


def summary(loss_sum: float, targets: float, bytes_per_target: float | None) -> dict[str, float]:
    """Figures of an evaluation from its sums: perplexity = exp(loss), bits per byte = loss / ln 2 / (bytes per target)."""
    loss = loss_sum / max(targets, 1)
    out = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700)), "eval_targets": int(targets)}
    if bytes_per_target:
        out["eval_bits_per_byte"] = loss / math.log(2) / bytes_per_target
    return out
