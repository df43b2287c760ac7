"""Conversations: messages become text by a Jinja chat template, and what the assistant says is what is learnt.

A record of `chat` data is a conversation: `messages`, or a `prompt` and a `completion` (or `chosen`). A record of `preference`
data has a `prompt` and two continuations, `chosen` and `rejected`. Each of these is a list of {"role", "content"}, or a string,
which is then one message: the user's as a prompt, the assistant's otherwise. Continuations that begin with the prompt are whole
conversations and do not repeat it; where a pair has no `prompt`, it is the messages that both begin with.

Targets are the tokens of the assistant's turns and the special token that ends each; a conversation that ends without one gets
the tokenizer's end token, so that the end is always learnt. What the assistant says is known by the template's own
{% generation %} marks, as Hugging Face has them, or by rendering the conversation up to the turn (with the prompt for it) and up
to its end: the template must then only ever add text. A template that has no such prompt (it passes add_generation_prompt over)
is shown two answers that differ from their first letter on; what it writes before both is not the assistant's.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.data.extras import needed
from jaxlm.data.tokenizer import Tokenizer
from partitioning.declaration import DeclarationError

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters, which no text holds: where the assistant's words begin and end


class TemplateError(ValueError):
    """A conversation that the template cannot render, or whose turns it does not tell apart."""


def conversation_of(record: dict) -> tuple[bytes | None, str]:
    """The conversation of a record of chat data, as JSON, or what is wrong with it."""
    try:
        if "messages" in record:
            messages = _messages(record, "messages", "user")
        else:
            answer = next((name for name in ("completion", "chosen") if name in record), None)
            if answer is None:
                fields = ", ".join(map(repr, list(record)[:8])) or "none"
                return None, f"has no messages and no prompt with completion or chosen (its fields: {fields})"
            prompt = _messages(record, "prompt", "user")
            messages = [*prompt, *_after(prompt, _messages(record, answer, "assistant"))]
    except TemplateError as error:
        return None, str(error)
    if not any(message["role"] == "assistant" for message in messages):
        return None, "has no message of the role 'assistant', so that there is nothing to learn"
    return _as_json(messages)


def preference_of(record: dict) -> tuple[bytes | None, str]:
    """The pair of a record of preference data, as JSON, or what is wrong with it."""
    try:
        answers = [_messages(record, name, "assistant") for name in ("chosen", "rejected")]
        if "prompt" in record:
            prompt = _messages(record, "prompt", "user")
        else:
            alike = itertools.takewhile(lambda both: both[0] == both[1], zip(*answers))
            prompt = [message for message, _ in alike][: min(map(len, answers)) - 1]
    except TemplateError as error:
        return None, str(error)
    chosen, rejected = (_after(prompt, answer) for answer in answers)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            return None, f"has no message of the role 'assistant' in the field {name!r} (behind the prompt)"
    pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return _as_json(pair)


def _as_json(found: Any) -> tuple[bytes | None, str]:
    text = json.dumps(found, ensure_ascii=False)
    for mark in (OPEN, CLOSE):
        if mark in text:
            return None, f"has the noncharacter U+{ord(mark):04X} in its messages, which is no text"
    try:
        return text.encode("utf-8"), ""
    except UnicodeEncodeError:
        return None, "has half a surrogate pair in its messages, which is no text"


def _after(prompt: list[dict], answer: list[dict]) -> list[dict]:
    """An answer without the prompt that it may begin with."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer


def _messages(record: dict, field: str, role: str) -> list[dict]:
    value = record.get(field)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value)
    ):
        raise TemplateError(
            f"has no list of messages with role and content in the field {field!r}"
            + ("" if field in record else f" (its fields: {', '.join(map(repr, list(record)[:8])) or 'none'})")
        )
    return list(value)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A preference: two continuations of one prompt, each with the prompt before it. Ids int32 [T]; loss bool [T], true at the
    targets, the assistant's turns after the prompt."""

    chosen: np.ndarray
    chosen_loss: np.ndarray
    rejected: np.ndarray
    rejected_loss: np.ndarray


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template and the tokenizer whose tokens it writes.

    Attributes:
      source: Jinja.
      where: what to call it in messages.
    """

    source: str
    tokenizer: Tokenizer
    where: str

    @functools.cached_property
    def _compiled(self) -> Any:
        jinja = needed("jinja2", "jinja2", f"{self.where}: a chat template")
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import CallBlock
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            tags = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller):
                return OPEN + caller() + CLOSE

        def refuse(message):
            raise TemplateError(f"is refused by the chat template: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.source)
        except jinja.TemplateSyntaxError as error:
            raise DeclarationError(f"{self.where} is no Jinja template: line {error.lineno}: {error.message}.") from None

    def render(self, messages: Sequence[dict], *, generation_prompt: bool = False) -> str:
        """The text of a conversation, with what asks for the assistant's next turn if that is wanted.

        Raises:
          TemplateError: the template cannot render it.
        """
        return self._marked(messages, generation_prompt).replace(OPEN, "").replace(CLOSE, "")

    def _marked(self, messages, generation_prompt=False):
        spelling = {i: token for token, i in self.tokenizer.special.items()}
        ends = {
            name: spelling.get(i, "") for name, i in (("bos_token", self.tokenizer.bos_id), ("eos_token", self.tokenizer.eos_id))
        }
        try:
            return self._compiled.render(messages=list(messages), add_generation_prompt=generation_prompt, tools=None, **ends)
        except (TemplateError, DeclarationError):
            raise
        except Exception as error:  # a template is a program, and may fail as one
            raise TemplateError(f"cannot be rendered by the chat template: {type(error).__name__}: {error}") from None

    def _turns(self, messages: Sequence[dict], after: int) -> tuple[str, list[tuple[int, int]]]:
        """The text, and [begin, end) in characters of each assistant's turn from message `after` on."""
        if re.search(r"{%[-+]?\s*generation\b", self.source):
            text, spans, marked = "", [], self._marked(messages)
            for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
                if piece == OPEN:
                    spans.append((len(text), len(text)))
                elif piece == CLOSE:
                    spans[-1] = (spans[-1][0], len(text))
                else:
                    text += piece
            before = sum(m["role"] == "assistant" for m in messages[:after])
            return text, spans[before:]
        text, spans = self.render(messages), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < after:
                continue
            begin, end = self._opening(messages[:i], text), self.render(messages[: i + 1])
            if not (text.startswith(end) and end.startswith(begin)):
                raise TemplateError(
                    "has an assistant's turn that the chat template renders differently once more follows; give a "
                    "template that marks what the assistant says with {% generation %} and {% endgeneration %} "
                    "(config.data.chat_template)"
                )
            spans.append((len(begin), len(end)))
        return text, spans

    @functools.cached_property
    def _prompts(self) -> bool:
        """Whether it writes something more where a prompt for the assistant's turn is asked for."""
        before = [{"role": "user", "content": "A"}]
        try:
            return self.render(before, generation_prompt=True) != self.render(before)
        except TemplateError:
            return True

    def _opening(self, before: Sequence[dict], text: str) -> str:
        """What a conversation says up to the assistant's turn behind the messages `before`."""
        if not self._prompts:
            return os.path.commonprefix([self.render([*before, {"role": "assistant", "content": a}]) for a in "AB"])
        if before:
            return self.render(before, generation_prompt=True)
        try:  # the assistant has the first word, and many a template fails without any
            opening = self.render(before, generation_prompt=True)
        except TemplateError:
            return ""
        return opening if text.startswith(opening) else ""

    def encode(self, messages: Sequence[dict], after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [T] of a conversation, and whether each is a target: bool [T].

        Args:
          after: messages before this one are context only.

        Raises:
          TemplateError: the template cannot render it, or does not tell its turns apart.
        """
        text, spans = self._turns(messages, after)
        ids, places = self.tokenizer.encode_with_offsets(text)
        begins, ends = places.T
        loss = np.zeros(len(ids), bool)
        special = np.isin(ids, list(self.tokenizer.special.values()))
        ended = True
        for begin, end in spans:
            # A token that the turn begins inside of, as a word with the space before it, is the assistant's.
            first, stop = np.searchsorted(ends, begin, side="right"), np.searchsorted(begins, end, side="left")
            inside = np.flatnonzero(special[first:stop])
            if (
                len(inside)
                and not text[begins[first + inside[-1]] : end].removeprefix(self._spelt(ids[first + inside[-1]])).strip()
            ):
                stop = first + inside[-1] + 1  # up to the end token, not the line break behind it
            elif stop < len(ids) and special[stop] and begins[stop] == end:
                stop += 1  # the end token, which stands outside the marks
            loss[first:stop] = True
            ended = stop > first and bool(special[stop - 1])
        if messages and messages[-1]["role"] == "assistant" and not ended and self.tokenizer.eos_id is not None:
            ids, loss = np.append(ids, np.int32(self.tokenizer.eos_id)), np.append(loss, True)
        return ids, loss

    def _spelt(self, special_id: int) -> str:
        return next(token for token, i in self.tokenizer.special.items() if i == special_id)

    def encode_pair(self, prompt: Sequence[dict], chosen: Sequence[dict], rejected: Sequence[dict]) -> Pair:
        """A preference, as `encode` encodes each of the two conversations."""
        return Pair(*(array for answer in (chosen, rejected) for array in self.encode([*prompt, *answer], len(prompt))))


def load_template(declared: str | None, tokenizer: Tokenizer, name: str) -> ChatTemplate:
    """The template of config.data.chat_template: a file, Jinja itself, or (None) what came with the tokenizer.

    Raises:
      DeclarationError: there is none.
    """
    if declared is None:
        if tokenizer.chat_template is None:
            raise DeclarationError(
                f"config.data.tokenizer = {name!r} brings no chat template (tokenizer_config.json beside it); "
                "set config.data.chat_template to a file with one."
            )
        return ChatTemplate(tokenizer.chat_template, tokenizer, f"the chat template of {name!r}")
    if "{" in declared:
        return ChatTemplate(declared, tokenizer, "config.data.chat_template")
    try:
        with open(os.path.expanduser(declared), encoding="utf-8") as handle:
            source = handle.read()
    except (OSError, ValueError) as error:  # no UTF-8, or no path
        raise DeclarationError(
            f"config.data.chat_template = {declared!r} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    return ChatTemplate(source, tokenizer, f"config.data.chat_template = {declared!r}")
