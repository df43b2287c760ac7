"""From a declaration to training and evaluation examples: the split, the end tokens, the counts and the messages."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.config import DataConfig
from jaxlm.data import eval_batches, open_data
from jaxlm.data.corpus import hold_out
from partitioning.declaration import DeclarationError

EOS = 256
TEXT = "Naïve café — 日本語 🙂👩‍🚀 end.\n"


def targets_of(examples):
    batch = examples.gather(np.arange(len(examples)))
    return batch["targets"][batch["mask"]].tolist()


def stream_of(examples):
    """The tokens of a ring from its first one on."""
    targets = targets_of(examples)
    return [targets[-1], *targets[:-1]]


def write(path, *texts):
    """One document in a .txt, several in a .jsonl."""
    if path.suffix == ".txt":
        path.write_text(texts[0], "utf-8")
    else:
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    return str(path)


def config(train, **options):
    return DataConfig(**{"train": (train,), "sequence_length": 4, "eval_fraction": 0.0, **options})


@hypothesis.given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6), st.floats(0, 0.99))
def test_the_cut_keeps_every_byte_breaks_no_character_and_holds_out_at_least_its_share(texts, fraction):
    documents = [text.encode("utf-8", "replace") for text in texts]
    first, last, inside = hold_out(documents, fraction)
    whole = b"".join(documents)
    assert b"".join(first) + b"".join(last) == whole
    for part in (*first, *last):
        assert part.decode("utf-8")            # whole characters, and no empty document
    assert len(first) + len(last) == len(documents) + inside
    held_out = len(b"".join(last))
    if fraction == 0:
        assert held_out == 0
    else:
        assert max(1, fraction * len(whole) - 1e-6) <= held_out < fraction * len(whole) + 5


def test_the_packaged_texts_last_tenth_is_held_out_and_every_byte_of_it_scored_once():
    data = open_data(DataConfig(), 264)
    text = open_data(DataConfig(eval_fraction=0.0), 264)
    whole = stream_of(text.train)
    assert stream_of(data.train) + targets_of(data.eval) == whole and len(whole) == 1_011_276
    assert data.eval.targets == data.eval.bytes == 101_128 and data.eval.bytes_per_target == 1
    assert data.eval.example(0)["inputs"][0] == whole[len(whole) - 101_128 - 1], "the context is the byte before"
    assert text.eval is None
    total = sum(int(batch["mask"].sum()) for batch in eval_batches(data.eval, batch_size=7))
    assert total == 101_128


def test_training_reads_only_what_is_not_held_out(tmp_path):
    data = open_data(config(write(tmp_path / "a.txt", "x" * 90 + "y" * 10), eval_fraction=0.1), 257)
    assert set(targets_of(data.train)) == {ord("x")} and set(targets_of(data.eval)) == {ord("y")}
    assert (data.train.bytes, data.eval.bytes) == (90, 10)


def test_a_single_text_holds_no_end_token(tmp_path):
    data = open_data(config(write(tmp_path / "a.txt", "hello world"), eval_fraction=0.3), 257)
    assert EOS not in targets_of(data.train) + targets_of(data.eval)


def test_the_end_token_stands_between_documents_and_where_the_ring_closes(tmp_path):
    path = write(tmp_path / "a.jsonl", "ab", "cd", "ef")
    expected = [97, 98, EOS, 99, 100, EOS, 101, 102, EOS]
    assert stream_of(open_data(config(path), 257).train) == expected
    assert stream_of(open_data(config(path, eos=False), 257).train) == list(b"abcdef")
    cut_at_a_border = open_data(config(path, eval_fraction=1 / 3, sequence_length=3), 257)
    assert stream_of(cut_at_a_border.train) == expected[:6] and targets_of(cut_at_a_border.eval) == [101, 102]
    assert cut_at_a_border.eval.example(0)["inputs"][0] == EOS
    cut_inside = open_data(config(path, eval_fraction=0.5, sequence_length=3), 257)
    assert stream_of(cut_inside.train) == [97, 98, EOS, 99] and targets_of(cut_inside.eval) == [100, EOS, 101, 102]
    assert cut_inside.eval.example(0)["inputs"][0] == 99


def test_evaluation_text_of_its_own_leaves_the_training_text_whole(tmp_path):
    train, other = write(tmp_path / "a.txt", "hello world"), write(tmp_path / "b.txt", "other")
    data = open_data(config(train, eval=(other,), eval_fraction=0.1), 257)
    assert bytes(stream_of(data.train)) == b"hello world" and bytes(targets_of(data.eval)) == b"other"
    assert data.eval.example(0)["inputs"][0] == EOS, "a text begins after an end"
    assert open_data(config(train, eval=(other,), eos=False), 257).eval.example(0)["inputs"][0] == ord("\n")


def test_evaluation_alone_needs_no_training_text(tmp_path):
    data = open_data(config(str(tmp_path / "gone.txt"), eval=(write(tmp_path / "b.txt", "other"),)), 257, train=False)
    assert data.train is None and data.eval.targets == 5 and data.lines()


def test_a_tokenizer_file_gives_fewer_tokens_and_the_bytes_stay_known(tmp_path, build):
    tokenizer = build(tmp_path / "tokenizer.json")
    data = open_data(config(write(tmp_path / "a.txt", TEXT * 20), eval_fraction=0.2, tokenizer=tokenizer), 300)
    size = len((TEXT * 20).encode())
    assert data.train.bytes + data.eval.bytes == size and data.eval.bytes_per_target > 1.5
    assert data.tokenizer.decode(stream_of(data.train)) + data.tokenizer.decode(targets_of(data.eval)) == TEXT * 20


def test_documents_of_a_tokenizer_without_end_token_follow_each_other_and_it_says_so(tmp_path, build):
    tokenizer = build(tmp_path / "tokenizer.json", special=("<pad>",))
    data = open_data(config(write(tmp_path / "a.jsonl", TEXT, TEXT), tokenizer=tokenizer), 300)
    assert data.tokenizer.decode(stream_of(data.train)) == TEXT * 2
    assert any("without an end token (the tokenizer has none)" in line for line in data.lines())


def test_the_facts_are_plain_and_tell_what_was_found(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello"}\n{"text": ""}\n{"no": 1}\n{"text": "you all"}\n')
    data = open_data(config(str(path), eval_fraction=0.25, on_bad_record="skip"), 257)
    assert json.loads(json.dumps(data.facts)) == data.facts
    facts = {k: data.facts[k] for k in ("documents", "skipped_records", "blank_documents", "train_bytes", "train_tokens",
                                        "train_examples", "eval_bytes", "eval_tokens", "eval_examples", "tokenizer")}
    assert facts == {"documents": 2, "skipped_records": 1, "blank_documents": 1, "train_bytes": 9, "train_tokens": 10,
                     "train_examples": 3, "eval_bytes": 3, "eval_tokens": 3, "eval_examples": 1, "tokenizer": "bytes"}
    text = "\n".join(data.lines())
    assert "9 bytes = 10 tokens = 3 examples" in text and "1 bad records were skipped" in text


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_both_numbers():
    with pytest.raises(DeclarationError) as error:
        open_data(DataConfig(), 256)
    said = str(error.value)
    assert "has 257 ids" in said and "config.model.vocab_size = 256" in said and "at least 257" in said


def test_a_sequence_longer_than_the_text_is_refused_with_the_numbers_and_the_longest_that_fits(tmp_path):
    path = write(tmp_path / "a.txt", "é" * 10)
    with pytest.raises(DeclarationError) as error:
        open_data(config(path, sequence_length=16, eval_fraction=0.2), 257)
    said = str(error.value)
    for words in ("config.data.sequence_length = 16", "give 16 tokens (16 bytes)", "needs 17", "at most 15", "held out"):
        assert words in said
    assert len(open_data(config(path, sequence_length=15, eval_fraction=0.2), 257).train) == 2


def test_messages_name_the_key_whose_text_is_wrong(tmp_path):
    with pytest.raises(DeclarationError, match="config.data.train: there is no file"):
        open_data(config(str(tmp_path / "a.txt")), 257)
    with pytest.raises(DeclarationError, match="config.data.eval: there is no file"):
        open_data(DataConfig(eval=(str(tmp_path / "a.txt"),)), 257)
