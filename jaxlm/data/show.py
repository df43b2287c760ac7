"""What training would see, as people read it: text with its borders and what is masked, counts, how long documents are."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.config import Config
from jaxlm.data.batches import train_batches
from jaxlm.data.corpus import Data
from jaxlm.data.encoder import Encoder, make_encoder
from jaxlm.data.files import find_files
from jaxlm.data.mixture import declared_sources
from jaxlm.data.sources import Counts, documents_of
from jaxlm.data.streams import with_documents
from jaxlm.data.tokenizer import Tokenizer

WIDTH = 40  # characters of a histogram's longest bar


def example_lines(row: dict[str, np.ndarray], tokenizer: Tokenizer) -> Iterator[str]:
    """One example, segment by segment: its targets as text, and ‹what is seen but not learnt› in angle brackets."""
    mask = row["mask"]
    segments = row.get("segment_ids", np.ones(len(mask), np.int32))
    padding = int((segments == 0).sum()) if "segment_ids" in row else 0
    count = len(np.unique(segments[segments > 0]))
    yield f"{len(mask)} places: {int(mask.sum())} targets, {count} segment{'s' * (count != 1)}, {padding} padding"
    for segment in np.unique(segments[segments > 0]).tolist():
        places = np.flatnonzero(segments == segment)
        yield f"--- segment {segment}: {len(places)} tokens"
        yield marked(np.append(row["inputs"][places[:1]], row["targets"][places]), np.append(False, mask[places]), tokenizer)


def marked(ids: np.ndarray, loss: np.ndarray, tokenizer: Tokenizer) -> str:
    """Text, special tokens spelt out; runs of ids that are no targets stand in angle brackets."""
    spelling = {i: token for token, i in tokenizer.special.items()}
    if tokenizer.kind == "bytes":
        spelling[tokenizer.eos_id] = "<end>"
    out = []
    for is_target, run in itertools.groupby(zip(ids.tolist(), loss.tolist()), key=lambda pair: pair[1]):
        text = ""
        for special, some in itertools.groupby((i for i, _ in run), key=lambda i: i in spelling):
            some = list(some)
            text += "".join(spelling[i] for i in some) if special else tokenizer.decode(some)
        out.append(text if is_target else f"‹{text}›")
    return "".join(out)


def histogram(lengths: np.ndarray) -> list[str]:
    """How many documents have how many tokens, by powers of two: lines with bars."""
    if not len(lengths):
        return ["no documents"]
    powers = np.bincount(np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), 0).astype(int))
    first = int(np.flatnonzero(powers)[0])
    most = powers.max()
    return [
        f"{(1 << p - 1) + 1 if p else 0:>11,} to {1 << p:>11,}  {n:>11,}  {'#' * int(np.ceil(n / most * WIDTH))}"
        for p, n in enumerate(powers.tolist())
        if p >= first
    ]


def show(data: Data, config: Config, count: int) -> Iterator[str]:
    """The first `count` examples of training, the counts of the sources and the lengths of their documents."""
    yield from data.lines()
    mixture = data.mixture(config.train.global_batch_size, config.data.seed, epochs=config.data.epochs)
    batches = train_batches(mixture, prefetch=0)
    rows = ((n, {k: v[r] for k, v in batch.items()}) for n, batch in enumerate(batches) for r in range(mixture.batch_size))
    for number, (batch, row) in enumerate(itertools.islice(rows, count)):
        whose, which = (int(array[0]) for array in mixture.locate(np.array([number])))
        of = f" of {mixture.names[whose]!r}" if len(mixture.names) > 1 else ""
        yield ""
        yield f"=== batch {batch}, row {number % mixture.batch_size}: example {which:,} of the order{of}"
        yield from example_lines(row, data.tokenizer)
    for name, examples in data.sources.items():
        stream = with_documents(examples.stream, data.tokenizer.eos_id)
        yield ""
        yield f"documents of {name!r} by their tokens ({len(stream.ends):,} documents, {len(stream):,} tokens)"
        yield from histogram(np.diff(stream.ends, prepend=0))


def show_preferences(config: Config, count: int) -> Iterator[str]:
    """The first `count` pairs of preference data, and how long their answers are."""
    encoder, lengths = make_encoder(config.data), []
    for number, pair in enumerate(preferences(encoder, config.data.train, config.data.on_bad_record)):
        lengths += [len(pair.chosen), len(pair.rejected)]
        if number < count:
            for name, ids, loss in (("chosen", pair.chosen, pair.chosen_loss), ("rejected", pair.rejected, pair.rejected_loss)):
                yield f"=== pair {number}, {name}: {len(ids)} tokens, {int(loss.sum())} targets"
                yield marked(ids, loss, encoder.tokenizer)
                yield ""
    yield f"conversations by their tokens ({len(lengths) // 2:,} pairs, {sum(lengths):,} tokens)"
    yield from histogram(np.array(lengths))


def preferences(encoder: Encoder, train: Sequence[Any], on_bad_record: str) -> Iterator[Any]:
    """The pairs (`chat.Pair`) of preference data, read as they are asked for; `encoder` is one of content 'preference'."""
    counts = Counts()
    for source in declared_sources(train):
        for file in find_files(source.paths, "config.data.train"):
            for document in documents_of(file, encoder.extract, on_bad_record, counts):
                pair = encoder.pair(document)
                if pair is not None:
                    yield pair
