"""Where the order of the data goes on from, when a run does.

The same data in the same order goes on at its next batch. Where a source's share changed (weights, stages, temperature, batch
size, sources that came or went), every source goes on with the example after its last one: none comes again before its epoch is
over. Where a source's examples or their order changed (sequence length, packing, seed, text, tokenizer), the ones that it had
given are none of the next ones, and it goes on with its next epoch; what was left of the last one is passed over. The latter is
never done unasked.

Where the data had ended inside a batch and may be passed more often now, the next example is the first of the next batch.
"""

import dataclasses
from typing import Any

from jaxlm.config import Config
from jaxlm.data.corpus import Data
from jaxlm.data.mixture import Mixture, Origin
from partitioning.declaration import DeclarationError

CUT = ("sequence_length", "pack", "seed")  # keys of config.data that change the examples, or which of them come when
SHARES = ("names", "stages")


def described(mixture: Mixture, data: Data, config: Config, next_batch: int) -> dict[str, Any]:
    """What a checkpoint holds of the order: enough to tell whether another run's is the same, and to go on from it if not."""
    return {
        "names": list(mixture.names),
        "examples": [len(source) for source in mixture.sources],
        "sha256": [data.facts["source_sha256"][name] for name in mixture.names],
        "stages": [[batch, list(quotas)] for batch, quotas in mixture.stages],
        "batch_size": mixture.batch_size,
        **{name: getattr(config.data, name) for name in CUT},
        "origin": {
            "batch": mixture.origin.batch,
            "taken": list(mixture.origin.taken),
            "gone": [list(facts) for facts in mixture.origin.gone],
        },
        "taken": list(mixture.taken(next_batch)),
    }


def origin_of(saved: dict[str, Any] | None, next_batch: int, data: Data, config: Config) -> tuple[Origin, list[str]]:
    """Where the order is counted from, and what to say of it.

    Args:
      saved: `described` of the checkpoint; None of one that was written before there was any.

    Raises:
      DeclarationError: shares or examples changed in a way that config.data.on_change refuses.
    """
    if saved is None:
        return Origin(), []
    mixture = data.mixture(config.train.global_batch_size, config.data.seed)
    new = described(mixture, data, config, 0)
    changed = [name for name in ("names", "stages", "batch_size", *CUT) if new[name] != saved.get(name, new[name])]
    gone = tuple((name, *facts) for name, *facts in saved["origin"].get("gone", ()))
    given = {name: facts for name, *facts in (*gone, *zip(saved["names"], saved["taken"], saved["examples"], saved["sha256"]))}
    others = any(digest != given[name][2] for name, digest in zip(new["names"], new["sha256"]) if name in given)
    if others and not {"sequence_length", "pack"} & set(changed):  # of which the fingerprint of the same tokens is another
        changed.append("sha256")
    if not changed:
        origin, taken = Origin(saved["origin"]["batch"], tuple(saved["origin"]["taken"]), gone), tuple(saved["taken"])
        order = dataclasses.replace(mixture, origin=origin, epochs=config.data.epochs)
        if sum(taken) < sum(order.taken(next_batch)):  # the last batch was partly empty, and there are more epochs now
            return Origin(next_batch, taken, gone), [
                f"data: its end left batch {next_batch} partly empty; the epochs that come now begin with the next batch"
            ]
        return origin, []
    declared = [name for name in changed if name in SHARES + CUT]
    if declared and config.data.on_change == "refuse":
        said = "\n  ".join(f"{_WORDS[name]}: {_shown(name, saved)} -> {_shown(name, new)}" for name in declared)
        raise DeclarationError(
            f"the order of the data changes at batch {next_batch}:\n  {said}\nTake it back, or declare how to go on: "
            "config.data.on_change = 'continue' lets every source go on after its last example, and from its next "
            "epoch where its examples are cut anew."
        )
    taken, lines = [], []
    for name, size, digest in zip(new["names"], new["examples"], new["sha256"]):
        count, old_size, old_digest = given.get(name, (0, 1, None))
        if not any(word in changed for word in CUT) and (digest == old_digest or not count):
            taken.append(count)
            continue
        epochs = -(-count // old_size)
        taken.append(epochs * size)
        if count % old_size:
            lines.append(
                f"data: the examples of {name!r} are cut anew: it goes on with epoch {epochs + 1}, and "
                f"{1 - count % old_size / old_size:.1%} of epoch {epochs} is passed over"
            )
    lines.insert(0, f"data: a new order from batch {next_batch} on ({', '.join(_WORDS[name] for name in changed)} changed)")
    gone = tuple((name, *facts) for name, facts in given.items() if name not in new["names"])
    return Origin(next_batch, tuple(taken), gone), lines


_WORDS = {
    "names": "the sources",
    "stages": "the shares",
    "batch_size": "the batch size",
    "sequence_length": "the sequence length",
    "pack": "the packing",
    "seed": "the seed",
    "sha256": "the tokens",
}


def _shown(name: str, order: dict[str, Any]) -> str:
    if name != "stages":
        return str(order[name])
    return ", then ".join(
        " ".join(f"{source} {quota / sum(quotas):.4g}" for source, quota in zip(order["names"], quotas))
        + (f" from step {batch + 1}" if batch else "")
        for batch, quotas in order["stages"]
    )
