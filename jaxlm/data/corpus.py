"""From a declaration to training and evaluation examples.

A source's corpus is its documents in order. Without text of its own, evaluation gets the last `eval_fraction` of each source: of
text so many of its bytes, cut at a character border, which may fall inside a document; of token files so many of their tokens.
The evaluation text is tokenized by itself, and all of its tokens are scored, the first one given the last token of the training
text.

Where there are several documents and config.data.eos is true, the end token stands between them, and a model learns where texts
end. It stands neither in a corpus of one document nor at a cut.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.config import DataConfig
from jaxlm.data.encoder import Encoder, beginning, make_encoder
from jaxlm.data.examples import Examples
from jaxlm.data.files import File, find_files
from jaxlm.data.mixture import Mixture, Origin, Source, declared_sources, declared_stages, quotas_of
from jaxlm.data.packing import PackedExamples, pack
from jaxlm.data.sources import read_files
from jaxlm.data.streams import Stream, joined, with_documents
from jaxlm.data.token_cache import open_cache
from jaxlm.data.token_files import read_bin
from jaxlm.data.tokenizer import REPLACEMENT, Tokenizer
from partitioning.declaration import DeclarationError


DECODED, CONTEXT = 1 << 20, 8  # tokens that are decoded together, and those before them


@dataclasses.dataclass(frozen=True)
class Data:
    """Everything that training and evaluation read.

    Attributes:
      tokenizer: the tokenizer.
      sources: of each source of training its name and its examples; empty when only evaluation text was opened.
      stages: (first batch, quotas of the sources).
      eval: examples for evaluation; None when there are none.
      facts: what was found, in plain values, for the opening lines and the checkpoint.
    """

    tokenizer: Tokenizer
    sources: dict[str, Examples | PackedExamples]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    eval: Examples | PackedExamples | None
    facts: dict[str, Any]

    @property
    def train(self) -> Examples | PackedExamples | None:
        """The examples of the only source; None when there are none, or several."""
        return next(iter(self.sources.values())) if len(self.sources) == 1 else None

    def mixture(self, batch_size: int, seed: int, origin: Origin = Origin(), epochs: int | None = None) -> Mixture:
        """The order of training's examples."""
        return Mixture(tuple(self.sources), tuple(self.sources.values()), self.stages, batch_size, seed, origin, epochs)

    def lines(self) -> list[str]:
        """What was found, in words."""
        facts = self.facts
        out = [f"tokenizer {facts['tokenizer']}, {facts['vocab_size']:,} ids"]
        for name, label in (("train", "training"), ("eval", "evaluation")):
            if facts[f"{name}_tokens"]:
                size = f"{facts[f'{name}_bytes']:,} bytes = " if facts[f"{name}_bytes"] is not None else ""
                out.append(
                    f"{label}: {size}{facts[f'{name}_tokens']:,} tokens = "
                    f"{facts[f'{name}_examples']:,} examples, from {facts[f'{name}_source']}"
                )
        for name, source in facts.get("sources", {}).items():
            shares = ", then ".join(
                f"{stage['shares'][name]:.2%}" + (f" (from step {stage['step'] + 1})" if stage["step"] else "")
                for stage in facts["stages"]
            )
            out.append(f"  {name}: {source['tokens']:,} tokens = {source['examples']:,} examples, share {shares}")
        if "padding" in facts:
            out.append(f"packed by best fit: {facts['padding']:.3%} of the places are padding")
        if facts["skipped_records"]:
            out.append(f"{facts['skipped_records']:,} bad records were skipped")
        if facts["blank_documents"]:
            out.append(f"{facts['blank_documents']:,} documents without text were left out")
        if facts["separator"] is None and (facts["documents"] or 0) > 1 and facts["content"] == "text":
            out.append(
                "documents follow each other without an end token"
                + (" (the tokenizer has none)" if self.tokenizer.eos_id is None else "")
            )
        return out


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A source, read: its streams for training and evaluation (None: nothing is held out)."""

    train: Stream
    eval: Stream | None
    says: str
    skipped: int = 0
    blank: int = 0
    documents: int | None = 0


def open_data(config: DataConfig, vocab_size: int, *, train: bool = True) -> Data:
    """Reads, checks, splits and tokenizes the text that `config` names; token files are mapped into memory.

    Args:
      vocab_size: ids that the model knows.
      train: False does not read the training text where the evaluation text has sources of its own.

    Raises:
      DeclarationError: the text or the tokenizer cannot be used; the message says which, why and the way out.
    """
    encoder = make_encoder(config)
    tokenizer = encoder.tokenizer
    if tokenizer.vocab_size > vocab_size:
        raise DeclarationError(
            f"config.data.tokenizer = {config.tokenizer!r} has {tokenizer.vocab_size} ids, but "
            f"config.model.vocab_size = {vocab_size}; set config.model.vocab_size to at least "
            f"{tokenizer.vocab_size}, or choose a smaller tokenizer."
        )
    if config.content == "preference":
        raise DeclarationError(
            "config.data.content = 'preference' can be read and looked at (python -m jaxlm.data show), but training "
            "on pairs is not built; 'chat' trains on the chosen answers."
        )
    declared = declared_sources(config.train)
    opened: list[_Opened] = []
    sources: dict[str, Any] = {}
    stages: tuple = ()
    eval_examples, eval_source, more = None, None, []
    held_out = 0.0 if config.eval else config.eval_fraction
    separator = encoder.eos
    if train or not config.eval:
        for source in declared:
            found = _open(source.paths, encoder, config, "config.data.train", vocab_size, held_out)
            opened.append(found)
            sources[source.name] = _training_examples(found.train, encoder, config, held_out, source, found)
        stages = _stages(config, declared, sources)
        parts = [found.eval for found in opened if found.eval is not None and len(found.eval)]
        if parts:
            before = int(opened[0].train.read(len(opened[0].train) - 1, len(opened[0].train))[0]) if len(opened) == 1 else None
            eval_examples = _evaluation_examples(joined(parts), encoder, config, before, "config.data.eval_fraction")
            eval_source = f"the last {held_out:.4g} of the same"
    if config.eval:
        found = _open(config.eval, encoder, config, "config.data.eval", vocab_size, 0.0)
        more.append(found)
        eval_examples = _evaluation_examples(found.train, encoder, config, None, "config.data.eval")
        eval_source = found.says

    everything = opened + more
    counts = [found.documents for found in everything]
    facts = {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "content": config.content,
        "documents": None if None in counts else sum(counts),
        "separator": separator,
        "train_source": "; ".join(found.says for found in opened) or None,
        "eval_source": eval_source,
        "skipped_records": sum(found.skipped for found in everything),
        "blank_documents": sum(found.blank for found in everything),
    }
    if sources:
        digests = {name: _fingerprint(examples) for name, examples in sources.items()}
        facts["source_sha256"] = digests
        facts["train_sha256"] = (
            next(iter(digests.values())) if len(digests) == 1 else hashlib.sha256(" ".join(digests.values()).encode()).hexdigest()
        )
        if config.pack == "best_fit":
            places = sum(len(x) for x in sources.values()) * config.sequence_length
            facts["padding"] = 1 - sum(x.places for x in sources.values()) / places
    if len(sources) > 1:
        facts["sources"] = {name: {"tokens": x.targets, "examples": len(x)} for name, x in sources.items()}
        facts["stages"] = [
            {"step": batch, "shares": {name: q / sum(quotas) for name, q in zip(sources, quotas)}} for batch, quotas in stages
        ]
    trained = list(sources.values())
    facts |= _counts("train", trained) | _counts("eval", [eval_examples] if eval_examples else [])
    return Data(tokenizer, sources, stages, eval_examples, facts)


def _counts(name: str, examples: Sequence[Any]) -> dict[str, Any]:
    sizes = [x.bytes for x in examples]
    return {
        f"{name}_bytes": None if None in sizes else sum(sizes),
        f"{name}_tokens": sum(x.targets for x in examples),
        f"{name}_examples": sum(len(x) for x in examples),
    }


def _fingerprint(examples: Examples | PackedExamples) -> str:
    """What tells training examples from others. Checkpoints hold it, so it stays what it was in the first of them."""
    digest, stream = hashlib.sha256(), examples.stream
    if isinstance(examples, PackedExamples) and stream.ends is not None:
        digest.update(np.ascontiguousarray(stream.ends))  # the same tokens between other borders are packed otherwise
    if stream.fingerprint:
        digest.update(stream.fingerprint.encode())
        return digest.hexdigest()
    for part in stream.parts:  # in memory: the tokens, as the examples' windows see them
        digest.update(np.ascontiguousarray(part))
    if isinstance(examples, Examples):
        digest.update(np.ascontiguousarray(stream.read(0, examples.length)))
    for part in stream.loss or ():
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()


def _open(names: Sequence[str], encoder: Encoder, config: DataConfig, key: str, vocab_size: int, held_out: float) -> _Opened:
    files = find_files(names, key)
    tokens = [file for file in files if file.holds_tokens]
    if not tokens:
        return _open_text(files, names, encoder, config, key, held_out)
    if len(tokens) < len(files):
        other = next(file.name for file in files if not file.holds_tokens)
        raise DeclarationError(
            f"{key} has tokens ({tokens[0].name}) beside text ({other}) in one source; tokenize the text first "
            "(python -m jaxlm.tokenize), or declare a mixture of both."
        )
    if config.content != "text" and any(file.kind != "cache" for file in files):
        raise DeclarationError(
            f"{key}: {files[0].name} does not say which of its tokens are targets; config.data.content = "
            f"{config.content!r} needs text, or a token cache that was made of it."
        )
    stream = joined([_open_tokens(file, encoder, config, vocab_size) for file in files])
    if not len(stream):
        raise DeclarationError(f"{key} = {tuple(names)!r} holds no tokens: {len(files)} files.")
    says = _say(names, len(files), stream.documents or 0)
    if not held_out:
        return _Opened(stream, None, says, documents=stream.documents)
    cut = min(math.floor(len(stream) * (1 - held_out)), len(stream) - 1)
    before = _bytes_before(stream, cut, encoder)
    return _Opened(
        stream.cut(0, cut, 0, before), stream.cut(cut, len(stream), before, stream.bytes), says, documents=stream.documents
    )


def _open_tokens(file: File, encoder: Encoder, config: DataConfig, vocab_size: int) -> Stream:
    if file.kind == "cache":
        return open_cache(file, encoder.tokenizer, encoder.options)
    return read_bin(file.path, dtype=config.token_dtype, vocab_size=encoder.tokenizer.vocab_size, limit=vocab_size)


def _bytes_before(stream: Stream, cut: int, encoder: Encoder) -> int | None:
    """The bytes of text before a place of a stream, where documents' bytes are known."""
    if stream.byte_ends is None:
        return None
    i = int(np.searchsorted(stream.ends, cut, side="right"))
    begin = int(stream.ends[i - 1]) if i else 0
    before = int(stream.byte_ends[i - 1]) if i else 0
    rest = _bytes_of(stream, begin, cut, encoder.tokenizer)
    return min(before + rest, int(stream.byte_ends[i]) if i < len(stream.byte_ends) else before)


def _bytes_of(stream: Stream, begin: int, end: int, tokenizer: Tokenizer) -> int:
    """The bytes of text of the tokens [begin, end), which may be many: a piece at a time, each decoded behind the last tokens of
    the one before, since a decoder may treat the first one differently. No piece ends inside a character."""
    total, before = 0, []
    while begin < end:
        ids = stream.read(begin, min(begin + DECODED, end)).tolist()
        for _ in range(CONTEXT):
            if begin + len(ids) >= end or not tokenizer.decode(ids[-CONTEXT:]).endswith(REPLACEMENT):
                break
            ids += stream.read(begin + len(ids), begin + len(ids) + 1).tolist()
        total += len(tokenizer.decode(before + ids).encode()) - len(tokenizer.decode(before).encode())
        begin, before = begin + len(ids), ids[-CONTEXT:]
    return total


def _open_text(
    files: list[File], names: Sequence[str], encoder: Encoder, config: DataConfig, key: str, held_out: float
) -> _Opened:
    corpus = read_files(files, encoder.extract, config.on_bad_record, key, names)
    several = len(corpus.documents) > 1
    if encoder.template is not None:  # a conversation is not cut
        count = len(corpus.documents)
        first = count - math.ceil(count * held_out) if held_out else count
        heads, tails, inside = list(corpus.documents[:first]), list(corpus.documents[first:]), False
    else:
        heads, tails, inside = hold_out(corpus.documents, held_out)
    encoded = encoder.encode(heads, closed=several and not inside), encoder.encode(tails, closed=config.pack == "best_fit")
    train, evaluation = encoded[0].stream(), encoded[1].stream() if tails else None
    if evaluation is not None and inside and encoder.begins:  # it begins in a document
        evaluation = evaluation.cut(1, len(evaluation), 0, evaluation.bytes)
    return _Opened(
        train,
        evaluation,
        _say(names, len(corpus.files), len(corpus.documents)),
        corpus.skipped + sum(part.skipped for part in encoded),
        corpus.blank,
        len(corpus.documents),
    )


def hold_out(documents: Sequence[bytes], fraction: float) -> tuple[list[bytes], list[bytes], bool]:
    """Splits documents into the first and the last `fraction` of their bytes.

    The cut moves back to the start of a character, so that the last part has at least its share. A fraction above 0 holds out
    something, and a fraction of 0 nothing.

    Returns:
      The first documents, the last ones, and whether the cut fell inside a document, which is then in both.
    """
    sizes = [len(document) for document in documents]
    if not fraction:
        return list(documents), [], False
    cut = min(math.floor(sum(sizes) * (1 - fraction)), sum(sizes) - 1)
    for i, size in enumerate(sizes):
        if cut < size:
            break
        cut -= size
    while cut and documents[i][cut] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        cut -= 1
    head, tail = documents[i][:cut], documents[i][cut:]
    return [*documents[:i], *([head] if head else [])], [tail, *documents[i + 1 :]], bool(head)


def _training_examples(
    stream: Stream, encoder: Encoder, config: DataConfig, held_out: float, source: Source, found: _Opened
) -> Examples | PackedExamples:
    size = None if encoder.template is not None else stream.bytes
    if config.pack == "best_fit":
        out = _packed(stream, encoder, config, size)
        if not len(out):
            raise DeclarationError(f"the training text of {source.name!r} gives no tokens; name more text in config.data.train.")
    else:
        if len(stream) <= config.sequence_length:
            kept = f", without the last {held_out:.4g} held out for evaluation," if held_out else ""
            way_out = f"set config.data.sequence_length to at most {len(stream) - 1}, or " if len(stream) > 1 else ""
            amount = "" if stream.bytes is None else f" ({stream.bytes} bytes)"
            raise DeclarationError(
                f"config.data.sequence_length = {config.sequence_length} is longer than the training text: "
                f"{found.says}{kept} give {len(stream)} tokens{amount}, and one example needs "
                f"{config.sequence_length + 1}; {way_out}name more text in config.data.train."
            )
        out = Examples.ring(stream, config.sequence_length, size)
    if not out.targets:
        raise DeclarationError(f"the training text of {source.name!r} has no target: none of its conversations can be rendered.")
    return out


def _packed(stream: Stream, encoder: Encoder, config: DataConfig, size: int | None) -> PackedExamples:
    stream = with_documents(stream, encoder.tokenizer.eos_id)
    return pack(stream, config.sequence_length, size, encoder.context, config.seed, begun=encoder.begins)


def _evaluation_examples(
    stream: Stream, encoder: Encoder, config: DataConfig, before: int | None, key: str
) -> Examples | PackedExamples:
    """Examples of the whole stream; `before`: the token that it follows, where it does."""
    if not stream.targets:
        raise DeclarationError(
            f"{key}: the evaluation text ({stream.bytes} bytes) gives no tokens under "
            f"config.data.tokenizer = {config.tokenizer!r}; choose another text or tokenizer."
        )
    size = None if encoder.template is not None else stream.bytes
    if config.pack == "best_fit":
        return _packed(stream, encoder, config, size)
    context = beginning(encoder.tokenizer, encoder.eos) if before is None else before
    return Examples.line(context, stream, config.sequence_length, size)


def _stages(config: DataConfig, declared: list[Source], sources: dict[str, Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    names = list(sources)
    stages = declared_stages(config.stages, names)
    weights = [len(sources[s.name]) if s.weight is None else float(s.weight) for s in declared]
    return (
        (0, quotas_of(weights, config.temperature, names, "config.data.train")),
        *((step, quotas_of(w, config.temperature, names, f"config.data.stages (step {step})")) for step, w in stages),
    )


def _say(names: Sequence[str], files: int, documents: int) -> str:
    named = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    counts = [f"{files} files"] * (files > 1) + [f"{documents:,} documents"] * (documents > files)
    return named + (f" ({', '.join(counts)})" if counts else "")
