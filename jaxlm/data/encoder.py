"""Documents to tokens, with what the configuration declares around them.

A document of text gets the beginning token before it (config.data.bos) and the end token behind it (config.data.eos); a
conversation what its template writes. Both in a training run and in `python -m jaxlm.tokenize`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxlm.config import DataConfig
from jaxlm.data.chat import ChatTemplate, Pair, TemplateError, conversation_of, load_template, preference_of
from jaxlm.data.sources import Extract, text_extract
from jaxlm.data.token_cache import OPTIONS, Encoded
from jaxlm.data.tokenizer import Tokenizer, load_tokenizer
from partitioning.declaration import DeclarationError


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Attributes:
    bos, eos: ids around a document of text, or None.
    template: for chats.
    options: what makes these tokens of a text; a cache's must be equal.
    """

    tokenizer: Tokenizer
    content: str
    bos: int | None
    eos: int | None
    template: ChatTemplate | None
    options: dict
    extract: Extract
    skip: bool

    def encode(self, documents: Sequence[bytes], *, closed: bool = True) -> Encoded:
        """The tokens of documents.

        Args:
          closed: whether the last document of text gets its end token too.

        Raises:
          DeclarationError: a conversation that the template cannot render, unless bad records are to be skipped.
        """
        losses, given = None, len(documents)
        if self.template is not None:
            found = [(document, tokens) for document in documents if (tokens := self._chat(document)) is not None]
            documents, ids, losses = ([document for document, _ in found], *([t[i] for _, t in found] for i in (0, 1)))
        else:
            ids = self.tokenizer.encode_documents(documents)
        before = [] if self.bos is None or losses else [self.bos]
        after = [] if self.eos is None or losses else [self.eos]
        around, size = len(before) + len(after), sum(map(len, ids))
        tokens = np.empty(size + around * len(ids), self.tokenizer.dtype)
        ends, place = np.empty(len(ids), np.int64), 0
        for i, array in enumerate(ids):
            for piece in (before, array, after):
                tokens[place : place + len(piece)] = piece
                place += len(piece)
            ends[i] = place
        if after and len(ids) and not closed:
            tokens, ends[-1] = tokens[:-1], ends[-1] - 1
        loss = None if losses is None else np.concatenate([np.zeros(0, bool), *losses]).astype(np.uint8)
        bytes_before = np.cumsum([len(document) for document in documents], dtype=np.int64)
        return Encoded(tokens, ends, bytes_before, loss, given - len(documents))

    def _chat(self, document: bytes) -> tuple[np.ndarray, np.ndarray] | None:
        return self._rendered(document, self.template.encode)

    def pair(self, document: bytes) -> Pair | None:
        """The pair of a record of preference data, as `chat.preference_of` gives it; None where it is skipped.

        Raises:
          DeclarationError: the template cannot render it, unless bad records are to be skipped.
        """
        return self._rendered(document, lambda found: self.template.encode_pair(**found))

    def _rendered(self, document: bytes, encode: Callable[[Any], Any]) -> Any:
        try:
            return encode(json.loads(document))
        except TemplateError as error:
            if not self.skip:
                raise DeclarationError(
                    f"a conversation that begins {document[:80].decode('utf-8', 'replace')!r} {error}. Mend it, or "
                    "set config.data.on_bad_record='skip'."
                ) from None
            return None

    @property
    def begins(self) -> bool:
        """Whether documents are declared to begin with `context` themselves."""
        return self.bos is not None and self.template is None

    @property
    def context(self) -> int:
        """The id before a document's first token, where documents are seen by themselves."""
        return self.bos if self.begins else beginning(self.tokenizer, self.eos)


def beginning(tokenizer: Tokenizer, separator: int | None) -> int:
    """The id that stands for 'a text begins here': the separator, else a line break, which comes nearest."""
    if separator is not None:
        return separator
    newline = tokenizer.encode("\n")
    return int(newline[-1]) if len(newline) else 0


def declared_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of a configuration, with the tokens that begin and end documents there.

    Raises:
      DeclarationError: the tokenizer cannot be used, or has no token that is declared.
    """
    tokenizer = load_tokenizer(config.tokenizer).with_ends(config.bos_token, config.eos_token)
    if config.bos and tokenizer.bos_id is None:
        raise DeclarationError(
            f"config.data.bos is true, but {config.tokenizer!r} has no token that begins a document; name one of "
            "its special tokens in config.data.bos_token."
        )
    return tokenizer


def make_encoder(config: DataConfig) -> Encoder:
    """The encoder that a configuration declares.

    Raises:
      DeclarationError: as `declared_tokenizer`; or there is no chat template where one is needed, or one where none is.
    """
    tokenizer = declared_tokenizer(config)
    template = load_template(config.chat_template, tokenizer, config.tokenizer) if config.content != "text" else None
    if config.content == "text" and config.chat_template is not None:
        raise DeclarationError("config.data.chat_template is for conversations; set config.data.content = 'chat'.")
    extract = {"text": text_extract(config.text_field), "chat": conversation_of, "preference": preference_of}[config.content]
    return Encoder(
        tokenizer,
        config.content,
        tokenizer.bos_id if config.bos else None,
        tokenizer.eos_id if config.eos else None,
        template,
        {
            **{name: getattr(config, name) for name in OPTIONS if config.content == "text" or name == "content"},
            "template_sha256": hashlib.sha256(template.source.encode()).hexdigest() if template else None,
            "bos_id": tokenizer.bos_id if config.bos and template is None else None,
            "eos_id": tokenizer.eos_id if config.eos and template is None else None,
        },
        extract,
        config.on_bad_record == "skip",
    )
