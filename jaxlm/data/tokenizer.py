"""Tokenizers: text to ids and back.

Three kinds. `bytes`: ids 0 to 255 are the bytes of UTF-8, 256 is the end of a document; nothing to train, nothing to download,
and a loss per token is a loss per byte. What the `tokenizers` library runs: a Hugging Face `tokenizer.json`, GPT-2's two files, a
tiktoken rank file (`tokenizer_files` reads those). And SentencePiece models, which need the package of that name.

Text comes out of a language model id by id, while a character may take several ids: `Tokenizer.stream()` gives a decoder that
holds back what is incomplete.
"""

import codecs
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from partitioning.declaration import DeclarationError, nearest

END_OF_BYTES = 256
PIECE = 1 << 18                                # bytes of a document that are tokenized at once
REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What every tokenizer says of itself.

    Attributes:
      kind: 'bytes', 'huggingface' or 'sentencepiece'.
      name: as it was asked for.
      vocab_size: one more than the largest id.
      eos_id: id that ends a document, if it has one.
      sha256: hash of what defines it, to tell whether a checkpoint's tokenizer is this one.
      bos_id: id that begins a document, if it has one.
      special: the special tokens, spelling to id.
      chat_template: the Jinja template that turns messages into text, if it brought one.
    """
    kind: str
    name: str
    vocab_size: int
    eos_id: int | None
    sha256: str
    bos_id: int | None = None
    special: dict[str, int] = dataclasses.field(default_factory=dict, repr=False, hash=False)
    chat_template: str | None = dataclasses.field(default=None, repr=False)

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text, without any special tokens added."""
        return self.encode_documents([text.encode("utf-8", "replace")])[0].astype(np.int32)

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each document (UTF-8), in the smallest unsigned dtype that holds `vocab_size`."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD; end tokens and ids without text give nothing."""
        raise NotImplementedError

    def stream(self) -> "StreamDecoder":
        """A decoder that takes one id at a time."""
        raise NotImplementedError

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """int32 ids [T] of a text, and the places in it, in characters, where each begins and ends: int64 [T, 2]."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        """The dtype of stored ids."""
        return np.dtype(np.uint16 if self.vocab_size <= 2 ** 16 else np.uint32)

    def with_ends(self, bos: str | None, eos: str | None) -> "Tokenizer":
        """This tokenizer with other tokens, of these spellings, for the beginning and the end of documents (None: its own).

        Raises:
          DeclarationError: it has no such special token.
        """
        changes = {}
        for field, key, token in (("bos_id", "bos_token", bos), ("eos_id", "eos_token", eos)):
            if token is None:
                continue
            if token not in self.special:
                raise DeclarationError(f"config.data.{key} = {token!r} is no special token of {self.name!r}; "
                                       f"{nearest(token, self.special, 'token') if self.special else 'it has none.'}")
            changes[field] = self.special[token]
        return dataclasses.replace(self, **changes) if changes else self


class StreamDecoder:
    """Decodes id by id: the parts that `feed` and `finish` give make up `decode` of all ids."""

    def feed(self, token: int) -> str:
        """The text that is now complete; '' while a character is not."""
        raise NotImplementedError

    def finish(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, and 256 for the end of a document."""

    def encode_documents(self, documents):
        return [np.frombuffer(document, np.uint8).astype(self.dtype) for document in documents]

    def encode_with_offsets(self, text):
        sizes = [len(character.encode("utf-8", "replace")) for character in text]
        begins = np.repeat(np.arange(len(text)), sizes)
        return self.encode(text), np.stack([begins, begins + 1], axis=1)

    def decode(self, ids):
        return bytes(i for i in map(int, ids) if i < END_OF_BYTES).decode("utf-8", "replace")

    def stream(self):
        return ByteStream()


class ByteStream(StreamDecoder):
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token):
        return self._decoder.decode(bytes([token])) if token < END_OF_BYTES else ""

    def finish(self):
        return self._decoder.decode(b"", final=True)


def pieces_of(text: str, encode: Any, size: int = PIECE) -> Iterator[str]:
    """Cuts a long text where its tokens do not change, so that its parts can be tokenized beside each other, in bounded memory.

    A cut comes before a line break or a space that follows a letter, and only where the tokens around it, taken together, are
    those of its two sides; where no such place is found, the text stays in one piece.

    Args:
      encode: texts -> their ids, each a list.
      size: characters of a piece, about.
    """
    start, around = 0, 200
    while len(text) - start > 2 * size:
        cut, place = None, start + size
        for _ in range(20):
            found = [at for mark in "\n " if (at := text.find(mark, place, place + size // 2)) > 0]
            if not found:
                break
            at = min(found)
            place = at + 1
            if text[at - 1].isalpha() and text[at + 1:at + 2].isalpha():
                left, right, both = encode([text[max(start, at - around):at], text[at:at + around],
                                            text[max(start, at - around):at + around]])
                if left + right == both:
                    cut = at
                    break
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizer(Tokenizer):
    """What the `tokenizers` library runs."""
    model: Any = dataclasses.field(default=None, repr=False, compare=False)          # tokenizers.Tokenizer

    def encode_documents(self, documents):
        out: list[list[np.ndarray]] = [[] for _ in documents]
        pieces = ((i, piece) for i, text in enumerate(documents) for piece in pieces_of(text.decode("utf-8"), self._ids))
        for some in _groups(pieces):                                   # bounds the library's memory; it uses all cores within
            for (i, _), ids in zip(some, self._arrays([piece for _, piece in some])):
                out[i].append(ids)
        return [arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in out]

    def _ids(self, texts):
        return [encoding.ids for encoding in self.model.encode_batch_fast(texts, add_special_tokens=False)]

    def _arrays(self, texts):
        return [np.array(encoding.ids, self.dtype) for encoding in self.model.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_offsets(self, text):
        encoding = self.model.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids):
        return self.model.decode([int(i) for i in ids if i < self.vocab_size], skip_special_tokens=True)

    def stream(self):
        return TextStream(self)


def _groups(pieces: Iterable[tuple[int, str]], count: int = 256, size: int = 1 << 20) -> Iterator[list[tuple[int, str]]]:
    """Runs of numbered pieces, of at most `count` and about `size` characters."""
    some, held = [], 0
    for piece in pieces:
        some.append(piece)
        held += len(piece[1])
        if len(some) == count or held >= size:
            yield some
            some, held = [], 0
    if some:
        yield some


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""
    model: Any = dataclasses.field(default=None, repr=False, compare=False)          # sentencepiece.SentencePieceProcessor

    def encode_documents(self, documents):
        return [np.array(ids, self.dtype) for ids in self.model.encode([d.decode("utf-8") for d in documents], out_type=int)]

    def encode_with_offsets(self, text):
        pieces = self.model.encode(text, out_type="proto").pieces
        return np.array([p.id for p in pieces], np.int32), np.array([(p.begin, p.end) for p in pieces], np.int64).reshape(-1, 2)

    def decode(self, ids):
        return self.model.decode([i for i in map(int, ids) if i < self.vocab_size and i not in self._silent])

    @functools.cached_property
    def _silent(self):
        return frozenset(self.special.values())

    def stream(self):
        return TextStream(self)


class TextStream(StreamDecoder):
    """Decodes the ids since the last but one complete character again and gives what is new.

    Some decoders treat the first id of a text differently (they drop its space), so the window always starts with ids whose
    text is out already.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._given = 0                                                # leading ids whose text is out

    def feed(self, token):
        self._ids.append(int(token))
        before, now = self._decode(self._ids[:self._given]), self._decode(self._ids)
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""
        self._ids, self._given = self._ids[self._given:], len(self._ids) - self._given
        return now[len(before):]

    def finish(self):
        out = self._decode(self._ids)[len(self._decode(self._ids[:self._given])):]
        self._ids, self._given = [], 0
        return out


def load_tokenizer(name: str, key: str = "config.data.tokenizer") -> Tokenizer:
    """The tokenizer of a configuration: 'bytes', or a file or folder as `tokenizer_files.read` knows it.

    Raises:
      DeclarationError: there is no such file, or it is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer("bytes", name, END_OF_BYTES + 1, END_OF_BYTES, hashlib.sha256(b"bytes").hexdigest())
    from jaxlm.data import tokenizer_files
    return tokenizer_files.read(name, key)
