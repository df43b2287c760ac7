"""Conversations: what the assistant says is learnt, with its end, and nothing else."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from jaxlm.config import Config, DataConfig
from jaxlm.data import load_tokenizer, open_data
from jaxlm.data.chat import ChatTemplate, TemplateError, conversation_of, load_template, preference_of
from jaxlm.data.encoder import make_encoder
from jaxlm.data.show import preferences, show, show_preferences
from partitioning.declaration import DeclarationError

pytest.importorskip("jinja2")
SHARED = pathlib.Path(__file__).parents[4] / "shared" / "data"
REAL = pytest.mark.skipif(not (SHARED / "chitchat_pairs.jsonl").exists(), reason="needs ../shared/data")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
MARKED = ("{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
          "{% else %}{{ m.content }}{% endif %}{{ eos_token }}\n{% endfor %}")
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}, {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "so long"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, build):
    return load_tokenizer(build(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def learnt(template, messages, after=0):
    """The runs of targets, as text with special tokens spelt out."""
    ids, loss = template.encode(messages, after)
    assert ids.dtype == np.int32 and loss.dtype == bool and len(ids) == len(loss)
    runs = [[i for i, _ in run] for on, run in itertools.groupby(zip(ids.tolist(), loss.tolist()), key=lambda x: x[1]) if on]
    return [template.tokenizer.model.decode(run, skip_special_tokens=False) for run in runs]


def test_marked_turns_are_learnt_with_the_end_token_that_follows_them(tokenizer):
    template = ChatTemplate(MARKED, tokenizer, "t")
    assert learnt(template, TALK) == ["hello you<|endoftext|>", "so long<|endoftext|>"]
    assert learnt(template, TALK, after=2) == ["so long<|endoftext|>"], "a prompt is context only"
    assert template.render(TALK[:1]) == "<user>hi<|endoftext|>\n", "the marks leave no trace"


def test_without_marks_turns_are_found_by_rendering_up_to_them(tokenizer):
    template = ChatTemplate(PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ eos_token }}"), tokenizer, "t")
    assert [turn.strip() for turn in learnt(template, TALK)] == ["hello you<|endoftext|>", "so long<|endoftext|>"]
    assert not any(turn.endswith("\n") for turn in learnt(template, TALK)), "the line break behind the end token is not"


def test_of_a_template_without_a_prompt_the_header_is_not_learnt(tokenizer):
    """It passes add_generation_prompt over; the marks may keep the white space before them."""
    bare = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    for talk in (TALK, TALK[1:]):
        assert learnt(ChatTemplate(bare, tokenizer, "t"), talk) == ["hello you<|endoftext|>", "so long<|endoftext|>"]
    kept = ChatTemplate(MARKED.replace("{% generation", "{%+ generation"), tokenizer, "t")
    assert learnt(kept, TALK) == ["hello you<|endoftext|>", "so long<|endoftext|>"]


def test_a_conversation_always_ends_with_an_end_token_that_is_learnt(tokenizer):
    assert learnt(ChatTemplate(PLAIN, tokenizer, "t"), TALK)[-1].endswith("so long\n<|endoftext|>")
    assert not learnt(ChatTemplate(PLAIN, tokenizer, "t"), TALK[:3])[-1].endswith("<|endoftext|>"), "the user had the last word"


def test_a_template_that_rewrites_what_came_before_is_refused_with_the_way_out(tokenizer):
    last_only = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '...' }}|{% endfor %}"
    with pytest.raises(TemplateError, match="{% generation %}"):
        ChatTemplate(last_only, tokenizer, "t").encode(TALK)


def test_templates_that_fail_say_why(tokenizer, tmp_path):
    with pytest.raises(DeclarationError, match="config.data.chat_template is no Jinja template: line 1"):
        load_template("{% for %}", tokenizer, "x").encode(TALK)
    with pytest.raises(TemplateError, match="refused by the chat template: no system here"):
        ChatTemplate("{{ raise_exception('no system here') }}", tokenizer, "t").encode(TALK)
    with pytest.raises(TemplateError, match="UndefinedError"):
        ChatTemplate("{{ messages[9].content.x }}", tokenizer, "t").encode(TALK)
    with pytest.raises(TemplateError, match="SecurityError"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", tokenizer, "t").encode(TALK)
    with pytest.raises(DeclarationError, match="brings no chat template"):
        load_template(None, tokenizer, "x")
    with pytest.raises(DeclarationError, match="cannot be read"):
        load_template(str(tmp_path / "none.jinja"), tokenizer, "x")
    (tmp_path / "t.jinja").write_text(PLAIN)
    assert load_template(str(tmp_path / "t.jinja"), tokenizer, "x").source == PLAIN


@pytest.mark.parametrize("record, words", [
    ({"text": "x"}, "has no messages and no prompt"), ({"messages": []}, "has no list of messages"),
    ({"messages": [{"role": "user"}]}, "has no list of messages"), ({"messages": TALK[:1]}, "nothing to learn"),
    ({"prompt": 3, "completion": "x"}, "in the field 'prompt'"),
    ({"prompt": "x", "completion": "\ud800"}, "half a surrogate pair"),
    ({"prompt": "x", "completion": "a \ufdd1 b"}, "the noncharacter U+FDD1")])
def test_what_is_no_conversation_is_named(record, words):
    assert words in conversation_of(record)[1]


def test_prompts_and_answers_are_conversations_and_pairs():
    assert json.loads(conversation_of({"prompt": "hi", "completion": "hello"})[0]) == [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert json.loads(preference_of({"prompt": "a", "chosen": "b", "rejected": TALK[1:2]})[0])["rejected"] == TALK[1:2]
    assert "in the field 'rejected'" in preference_of({"prompt": "a", "chosen": "b"})[1]


@pytest.mark.parametrize("prompt", ["hi", TALK[:1], None])
def test_answers_that_begin_with_the_prompt_do_not_repeat_it(prompt):
    no = {"role": "assistant", "content": "no"}
    record = {"chosen": TALK, "rejected": [TALK[0], no], **({"prompt": prompt} if prompt else {})}
    assert json.loads(preference_of(record)[0]) == {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [no]}
    assert prompt is None or json.loads(conversation_of(record)[0]) == TALK
    alike = json.loads(preference_of({"chosen": TALK, "rejected": TALK})[0])
    assert alike["prompt"] == TALK[:3] and alike["chosen"] == TALK[3:], "each keeps an answer"
    assert "no message of the role 'assistant' in the field 'rejected'" in preference_of({**record, "rejected": TALK[:1]})[1]


def test_where_the_assistant_has_the_first_word_its_header_is_not_learnt(tokenizer):
    template = ChatTemplate(PLAIN, tokenizer, "t")
    assert learnt(template, [TALK[1], TALK[0]])[0].strip() == "hello you"


def test_what_the_template_cannot_render_stops_the_reading_or_is_skipped_and_counted(tmp_path, build):
    refusing = "{% if 'bad' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + PLAIN
    records = [{"prompt": word, "chosen": "yes", "rejected": "no"} for word in ("good", "bad", "fine")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = dict(train=(str(tmp_path / "a.jsonl"),), chat_template=refusing, sequence_length=8, eval_fraction=0.0,
                   tokenizer=build(tmp_path / "tokenizer.json"))
    def chat(rule):
        return open_data(DataConfig(content="chat", on_bad_record=rule, **options), 300)
    def pairs(rule):
        config = DataConfig(content="preference", on_bad_record=rule, **options)
        return list(preferences(make_encoder(config), config.train, rule))
    for read in (chat, pairs):
        with pytest.raises(DeclarationError, match="refused by the chat template: no. Mend it"):
            read("fail")
    assert chat("skip").facts["skipped_records"] == 1 and chat("skip").sources["train"].stream.documents == 2
    assert len(pairs("skip")) == 2


@REAL
def test_a_published_template_reads_real_conversations_turn_by_turn(capsys):
    names = dict(train=(str(SHARED / "chitchat_pairs.jsonl"),), tokenizer=str(SHARED / "smollm2_tokenizer.json"))
    template = make_encoder(DataConfig(content="chat", **names)).template
    for line in (SHARED / "chitchat_pairs.jsonl").read_text().splitlines()[:50]:
        messages = json.loads(conversation_of(json.loads(line))[0])
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        assert learnt(template, messages) == [text + "<|im_end|>" for text in said]
    pairs = preferences(make_encoder(DataConfig(content="preference", **names)), names["train"], "fail")
    for pair, line in zip(pairs, (SHARED / "chitchat_pairs.jsonl").read_text().splitlines()[:20]):
        record = json.loads(line)
        for ids, loss, answer in ((pair.chosen, pair.chosen_loss, record["chosen"]),
                                  (pair.rejected, pair.rejected_loss, record["rejected"])):
            text = "".join(m["content"] + "<|im_end|>" for m in answer if m["role"] == "assistant")
            assert template.tokenizer.model.decode(ids[loss].tolist(), skip_special_tokens=False) == text
            assert template.tokenizer.decode(ids.tolist()).count(record["prompt"][0]["content"]) >= 1


@REAL
def test_conversations_are_trained_on_packed_and_shown_as_people_read_them(tmp_path):
    lines = (SHARED / "chitchat_pairs.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(lines[:120]), "utf-8")
    data = DataConfig(content="chat", pack="best_fit", sequence_length=512, train=(str(tmp_path / "some.jsonl"),),
                      tokenizer=str(SHARED / "smollm2_tokenizer.json"))
    opened = open_data(data, 49_152)
    rows = opened.train.gather(np.arange(len(opened.train)))
    assert rows["mask"].sum() == opened.train.targets < 0.5 * (rows["segment_ids"] > 0).sum()
    assert opened.eval.targets > 0 and opened.eval.bytes_per_target is None, "conversations, whole, are held out"
    config = Config(data=data)
    lines = list(show(opened, config, 2))
    text = "\n".join(lines)
    assert "=== batch 0, row 1: example 1 of the order" in text and "--- segment 1:" in text
    assert "<|im_start|>assistant\n›" in text and "<|im_end|>‹" in text, "what is not learnt stands in angle brackets"
    assert any(line.startswith("documents of 'train' by their tokens") for line in lines) and "#####" in lines[-1] + lines[-2]
    preference = DataConfig(content="preference", train=data.train, tokenizer=data.tokenizer)
    pairs = "\n".join(show_preferences(Config(data=preference), 1))
    assert "=== pair 0, chosen:" in pairs and "120 pairs" in pairs
    with pytest.raises(DeclarationError, match="training on pairs is not built; 'chat' trains on the chosen answers"):
        open_data(preference, 49_152)
