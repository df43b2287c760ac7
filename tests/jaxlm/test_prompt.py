"""Prompts: a text begins as documents do, what a user says goes through the chat template, and each has its ends."""

import json

import pytest
import tokenizers

from jaxlm.config import DataConfig
from jaxlm.data.encoder import declared_tokenizer
from jaxlm.huggingface.configured import tokenizer_of
from jaxlm.prompt import chat_prompt, text_prompt
from partitioning.declaration import DeclarationError

TEMPLATE = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")
SPECIAL = ("[bos]", "[eos]", "[end]", "[user]", "[assistant]")
BOS, EOS, END, USER, ASSISTANT = range(5)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of letters, whose documents and turns end otherwise."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *"\n abcdefghijklmnopqrstuvwxyz"))}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.add_special_tokens(list(SPECIAL))
    model.post_processor = tokenizers.processors.TemplateProcessing("[bos] $A", special_tokens=[("[bos]", BOS)])
    model.save(str(tmp_path / "tokenizer.json"))
    described(tmp_path)
    return tmp_path


def described(folder, **more):
    config = dict(bos_token="[bos]", eos_token={"content": "[eos]"}, chat_template=TEMPLATE) | more
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def config_of(folder, **more):
    return DataConfig(**tokenizer_of(folder) | more)


def test_a_text_begins_as_the_tokenizer_s_documents_do(folder):
    config = config_of(folder)
    tokenizer = declared_tokenizer(config)
    letters = tokenizer.encode("ab").tolist()
    assert text_prompt(config, tokenizer, "ab") == ([BOS, *letters], {EOS})
    assert text_prompt(config, tokenizer, "[bos]ab")[0] == [BOS, *letters]
    plain = config_of(folder, bos=False, eos_token="[end]")
    assert text_prompt(plain, declared_tokenizer(plain), "ab") == (letters, {END})


@pytest.mark.parametrize("more, begins", [
    (dict(), True), (dict(add_bos_token=False), False), (dict(add_bos_token=True), True), (dict(bos_token="[end]"), False),
    (dict(bos_token=None, add_bos_token=True), False)])
def test_what_a_folder_s_files_say_of_the_beginning(more, begins, folder):
    described(folder, **more)
    assert tokenizer_of(folder) == {"tokenizer": str(folder), "bos": begins}


def test_a_folder_without_a_post_processor_puts_nothing_before_a_text(folder):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    assert not config_of(folder).bos


def test_what_a_user_says_goes_through_the_template_and_ends_where_a_turn_does(folder):
    pytest.importorskip("jinja2")
    config = config_of(folder)
    tokenizer = declared_tokenizer(config)
    ids, ends = chat_prompt(config, tokenizer, "hi")
    assert ids == [BOS, USER, *tokenizer.encode("hi").tolist(), END, *tokenizer.encode("\n").tolist(), ASSISTANT]
    assert ends == {EOS, END}


def test_without_a_template_or_with_one_that_refuses_the_way_out_is_said(folder):
    pytest.importorskip("jinja2")
    described(folder, chat_template=None)
    config = config_of(folder)
    with pytest.raises(DeclarationError, match="brings no chat template"):
        chat_prompt(config, declared_tokenizer(config), "hi")
    config = config_of(folder, chat_template="{{ raise_exception('say less') }}")
    with pytest.raises(DeclarationError, match="the prompt is refused by the chat template: say less"):
        chat_prompt(config, declared_tokenizer(config), "hi")
