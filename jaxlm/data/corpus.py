"""From a declaration to training and evaluation examples.

The corpus is its documents in order. Without text of its own, evaluation gets the last `eval_fraction` of the corpus's bytes:
a cut at a character border, which may fall inside a document. The evaluation text is tokenized by itself, and all of its tokens
are scored, the first one given the last token of the training text.

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
from jaxlm.data.examples import Examples
from jaxlm.data.sources import Corpus, read_corpus
from jaxlm.data.tokenizer import Tokenizer, load_tokenizer
from partitioning.declaration import DeclarationError


@dataclasses.dataclass(frozen=True)
class Data:
    """Everything that training and evaluation read.

    Attributes:
      tokenizer: the tokenizer.
      train: examples for training; None when only evaluation text was opened.
      eval: examples for evaluation; None when there are none.
      facts: what was found, in plain values, for the opening lines and the checkpoint.
    """
    tokenizer: Tokenizer
    train: Examples | None
    eval: Examples | None
    facts: dict[str, Any]

    def lines(self) -> list[str]:
        """What was found, in words."""
        facts = self.facts
        out = [f"tokenizer {facts['tokenizer']}, {facts['vocab_size']:,} ids"]
        for name, label in (("train", "training"), ("eval", "evaluation")):
            if facts[f"{name}_tokens"]:
                out.append(f"{label}: {facts[f'{name}_bytes']:,} bytes = {facts[f'{name}_tokens']:,} tokens = "
                           f"{facts[f'{name}_examples']:,} examples, from {facts[f'{name}_source']}")
        if facts["skipped_records"]:
            out.append(f"{facts['skipped_records']:,} bad JSONL records were skipped")
        if facts["blank_documents"]:
            out.append(f"{facts['blank_documents']:,} documents without text were left out")
        if facts["separator"] is None and facts["documents"] > 1:
            out.append("documents follow each other without an end token"
                       + (" (the tokenizer has none)" if self.tokenizer.eos_id is None else ""))
        return out


def open_data(config: DataConfig, vocab_size: int, *, train: bool = True) -> Data:
    """Reads, checks, splits and tokenizes the text that `config` names.

    Args:
      vocab_size: ids that the model knows.
      train: False does not read the training text where the evaluation text has sources of its own.

    Raises:
      DeclarationError: the text or the tokenizer cannot be used; the message says which, why and the way out.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise DeclarationError(f"config.data.tokenizer = {config.tokenizer!r} has {tokenizer.vocab_size} ids, but "
                               f"config.model.vocab_size = {vocab_size}; set config.model.vocab_size to at least "
                               f"{tokenizer.vocab_size}, or choose a smaller tokenizer.")
    read = dict(text_field=config.text_field, on_bad_record=config.on_bad_record)
    corpora: list[Corpus] = []
    train_examples = eval_examples = None
    train_source = eval_source = None
    separator = tokenizer.eos_id if config.eos else None

    if train or not config.eval:
        corpus = read_corpus(config.train, key="config.data.train", **read)
        corpora.append(corpus)
        held_out = 0.0 if config.eval else config.eval_fraction
        train_documents, eval_documents, inside = hold_out(corpus.documents, held_out)
        several = len(corpus.documents) > 1
        stream = join(tokenizer, train_documents, separator, closed=several and not inside)
        _check_length(stream, train_documents, config, held_out, len(corpus.files))
        train_examples = Examples.ring(stream, config.sequence_length, _size(train_documents))
        train_source = _say_files(corpus, config.train)
        if eval_documents:
            tokens = join(tokenizer, eval_documents, separator)
            eval_examples = _line(int(stream[-1]), tokens, eval_documents, config, "config.data.eval_fraction")
            eval_source = f"the last {held_out:.4g} of the same"
    if config.eval:
        corpus = read_corpus(config.eval, key="config.data.eval", **read)
        corpora.append(corpus)
        tokens = join(tokenizer, corpus.documents, separator)
        eval_examples = _line(_beginning(tokenizer, separator), tokens, corpus.documents, config, "config.data.eval")
        eval_source = _say_files(corpus, config.eval)

    facts = {"tokenizer": tokenizer.name, "tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
             "documents": sum(len(c.documents) for c in corpora), "separator": separator,
             "train_source": train_source, "eval_source": eval_source,
             "skipped_records": sum(c.skipped for c in corpora), "blank_documents": sum(c.blank for c in corpora)}
    if train_examples:
        facts["train_sha256"] = hashlib.sha256(np.ascontiguousarray(train_examples.tokens)).hexdigest()
    for name, examples in (("train", train_examples), ("eval", eval_examples)):
        facts |= {f"{name}_bytes": examples.bytes if examples else 0, f"{name}_tokens": examples.targets if examples else 0,
                  f"{name}_examples": len(examples) if examples else 0}
    return Data(tokenizer, train_examples, eval_examples, facts)


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
    while cut and documents[i][cut] & 0xC0 == 0x80:                    # a continuation byte of UTF-8
        cut -= 1
    head, tail = documents[i][:cut], documents[i][cut:]
    return [*documents[:i], *([head] if head else [])], [tail, *documents[i + 1:]], bool(head)


def join(tokenizer: Tokenizer, documents: Sequence[bytes], separator: int | None, closed: bool = False) -> np.ndarray:
    """One stream of ids [T], the separator between documents and, when `closed`, after the last one too."""
    parts = []
    for ids in tokenizer.encode_documents(documents):
        parts.append(ids)
        if separator is not None:
            parts.append(np.array([separator], tokenizer.dtype))
    if separator is not None and not closed:
        parts = parts[:-1]
    return np.concatenate([np.zeros(0, tokenizer.dtype), *parts])


def _beginning(tokenizer: Tokenizer, separator: int | None) -> int:
    """The id that stands for 'a text begins here': the separator, else a line break, which comes nearest."""
    if separator is not None:
        return separator
    newline = tokenizer.encode("\n")
    return int(newline[-1]) if len(newline) else 0


def _line(context: int, tokens: np.ndarray, documents: Sequence[bytes], config: DataConfig, key: str) -> Examples:
    if not len(tokens):
        raise DeclarationError(f"{key}: the evaluation text ({_size(documents)} bytes) gives no tokens under "
                               f"config.data.tokenizer = {config.tokenizer!r}; choose another text or tokenizer.")
    return Examples.line(context, tokens, config.sequence_length, _size(documents))


def _check_length(stream: np.ndarray, documents: Sequence[bytes], config: DataConfig, held_out: float, files: int) -> None:
    if len(stream) > config.sequence_length:
        return
    kept = f", without the last {held_out:.4g} held out for evaluation," if held_out else ""
    way_out = f"set config.data.sequence_length to at most {len(stream) - 1}, or " if len(stream) > 1 else ""
    raise DeclarationError(f"config.data.sequence_length = {config.sequence_length} is longer than the training text: {files} "
                           f"files{kept} give {len(stream)} tokens ({_size(documents)} bytes), and one example needs "
                           f"{config.sequence_length + 1}; {way_out}name more text in config.data.train.")


def _size(documents: Sequence[bytes]) -> int:
    return sum(map(len, documents))


def _say_files(corpus: Corpus, names: Sequence[str]) -> str:
    files, documents = len(corpus.files), len(corpus.documents)
    named = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    counts = [f"{files} files"] * (files > 1) + [f"{documents} documents"] * (documents > files)
    return named + (f" ({', '.join(counts)})" if counts else "")
