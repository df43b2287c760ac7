"""Tokenizers: text to ids and back.

Two kinds. `bytes`: ids 0 to 255 are the bytes of UTF-8, 256 is the end of a document; nothing to train, nothing to download,
and a loss per token is a loss per byte. Or a Hugging Face `tokenizer.json`, read by the `tokenizers` library.

Text comes out of a language model id by id, while a character may take several ids: `Tokenizer.stream()` gives a decoder that
holds back what is incomplete.
"""

import codecs
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from partitioning.declaration import DeclarationError

# Names under which tokenizers know the end of a document, the usual ones of base models first.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<|eot_id|>", "<end_of_turn>",
              "<｜end▁of▁sentence｜>", "[EOS]")
END_OF_BYTES = 256
REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What every tokenizer says of itself.

    Attributes:
      kind: 'bytes' or 'huggingface'.
      name: as it was asked for.
      vocab_size: one more than the largest id.
      eos_id: id that ends a document, if it has one.
      sha256: hash of what defines it, to tell whether a checkpoint's tokenizer is this one.
    """
    kind: str
    name: str
    vocab_size: int
    eos_id: int | None
    sha256: str

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

    @property
    def dtype(self) -> np.dtype:
        """The dtype of stored ids."""
        return np.dtype(np.uint16 if self.vocab_size <= 2 ** 16 else np.uint32)


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


@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`."""
    model: Any = dataclasses.field(repr=False, compare=False)          # tokenizers.Tokenizer

    def encode_documents(self, documents):
        out = []
        for start in range(0, len(documents), 1024):                   # bounds the library's memory; it uses all cores within
            texts = [document.decode("utf-8") for document in documents[start:start + 1024]]
            encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
            out += [np.asarray(encoding.ids, self.dtype) for encoding in encodings]
        return out

    def decode(self, ids):
        return self.model.decode([int(i) for i in ids if i < self.vocab_size], skip_special_tokens=True)

    def stream(self):
        return HuggingFaceStream(self)


class HuggingFaceStream(StreamDecoder):
    """Decodes the ids since the last but one complete character again and gives what is new.

    Some decoders treat the first id of a text differently (they drop its space), so the window always starts with ids whose
    text is out already.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer):
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
    """The tokenizer of a configuration: 'bytes', or the path of a tokenizer.json (or of the folder that holds one).

    Raises:
      DeclarationError: there is no such file, or it is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer("bytes", name, END_OF_BYTES + 1, END_OF_BYTES, hashlib.sha256(b"bytes").hexdigest())
    path = pathlib.Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DeclarationError(f"{key} = {name!r} is neither 'bytes' nor a tokenizer.json that can be read: {path}: "
                               f"{error.strerror}. Names of a model hub are not looked up; give the path of the file.") from None
    import tokenizers                                                  # a tenth of a second, of use only here
    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:                                         # the library raises plain Exception
        raise DeclarationError(f"{key} = {name!r}: {path} is no Hugging Face tokenizer.json: {error}.") from None
    model.no_truncation()                                              # a file may carry both, and they would cut the corpus
    model.no_padding()
    special = {token.content: i for i, token in model.get_added_tokens_decoder().items() if token.special}
    eos_id = next((special[end] for end in END_TOKENS if end in special), None)
    vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values(), default=-1)
    return HuggingFaceTokenizer("huggingface", name, vocab_size, eos_id, hashlib.sha256(content).hexdigest(), model)
