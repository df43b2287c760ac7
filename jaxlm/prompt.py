"""A prompt as the ids that a model goes on from, and the ids at which its answer ends."""

from jaxlm.config import DataConfig
from jaxlm.data.chat import ChatTemplate, TemplateError, load_template
from jaxlm.data.tokenizer import Tokenizer
from partitioning.declaration import DeclarationError


def text_prompt(config: DataConfig, tokenizer: Tokenizer, text: str) -> tuple[list[int], set[int]]:
    """A text as documents begin: with the beginning token where config.data.bos puts one. It ends as they do."""
    ids = tokenizer.encode(text).tolist()
    if config.bos and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    return ids, {tokenizer.eos_id} - {None}


def chat_prompt(config: DataConfig, tokenizer: Tokenizer, text: str) -> tuple[list[int], set[int]]:
    """What a user says, as the chat template puts it, up to where the assistant is to speak. It ends with the assistant's turn.

    Raises:
      DeclarationError: there is no chat template, or it cannot render this.
    """
    template = load_template(config.chat_template, tokenizer, config.tokenizer)
    said = [{"role": "user", "content": text}]
    try:
        ids = tokenizer.encode(template.render(said, generation_prompt=True)).tolist()
    except TemplateError as error:
        raise DeclarationError(f"{template.where}: the prompt {error}.") from None
    return ids, ({tokenizer.eos_id} | _turn_ends(template, said)) - {None}


def _turn_ends(template: ChatTemplate, said: list[dict]) -> set[int]:
    """The special token that the template writes behind an assistant's turn; it need not be the one that ends documents."""
    try:
        ids, loss = template.encode([*said, {"role": "assistant", "content": "yes"}])
    except TemplateError:
        return set()
    learnt = ids[loss].tolist()
    return set(learnt[-1:]) & set(template.tokenizer.special.values())
