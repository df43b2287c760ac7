"""Text to ids and back, whole and id by id."""

import json
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.data.tokenizer import load_tokenizer
from partitioning.declaration import DeclarationError

SMOLLM2 = pathlib.Path(__file__).parents[4] / "shared" / "data" / "smollm2_tokenizer.json"
TEXT = "Naïve café — 日本語 🙂👩‍🚀 end.\n"


@pytest.fixture(scope="module", params=["bytes", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory, build):
    if request.param == "bytes":
        return load_tokenizer("bytes")
    return load_tokenizer(build(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", request.param))


def streamed(tokenizer, ids):
    decoder = tokenizer.stream()
    return [decoder.feed(i) for i in ids] + [decoder.finish()]


def test_text_survives_the_round_trip(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32 and ids.ndim == 1 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer.encode("")) == 0 and tokenizer.decode([]) == ""


def test_bytes_are_the_bytes_and_an_end_token():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.kind) == (257, 256, "bytes")
    assert tokenizer.decode([104, 256, 105, 263]) == "hi", "ends and ids that only the model's padding knows give no text"


def test_incomplete_characters_become_replacement_characters(tokenizer):
    if tokenizer.kind == "bytes":
        assert tokenizer.decode([0x61, 0xE6, 0x97]) == "a\ufffd"
    ids = tokenizer.encode("a🙂")
    assert tokenizer.decode(ids[:-1]).startswith("a\ufffd")


def test_streaming_gives_whole_characters_as_soon_as_they_are_complete(tokenizer):
    parts = streamed(tokenizer, tokenizer.encode(TEXT))
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts) and parts[-1] == ""
    assert max(map(len, parts)) <= 12, "text is not held back until the end"


def test_streaming_gives_up_what_never_completes(tokenizer):
    ids = tokenizer.encode("e🙂")[:-1]
    parts = streamed(tokenizer, ids)
    assert not any("\ufffd" in part for part in parts[:-1]) and "\ufffd" in parts[-1]
    assert "".join(parts) == tokenizer.decode(ids)


@hypothesis.given(st.lists(st.integers(0, 262), max_size=40))
def test_streamed_bytes_equal_decoded_bytes_for_any_ids(ids):
    tokenizer = load_tokenizer("bytes")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@hypothesis.given(st.data())
def test_streamed_pieces_equal_decoded_pieces_for_any_ids(tmp_path_factory, build, data):
    path = tmp_path_factory.getbasetemp() / "any_ids.json"
    tokenizer = load_tokenizer(str(path) if path.exists() else build(path))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@hypothesis.given(st.text(max_size=30))
def test_any_text_streams_through_bytes(text):
    tokenizer = load_tokenizer("bytes")
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


@pytest.mark.parametrize("special, end", [
    (("<|im_end|>", "<|endoftext|>"), "<|endoftext|>"), (("<pad>", "<|im_end|>"), "<|im_end|>"), (("</s>",), "</s>"),
    (("<eos>", "<pad>"), "<eos>"), (("<pad>",), None)])
def test_the_end_token_is_found_by_its_name(tmp_path, build, special, end):
    tokenizer = load_tokenizer(build(tmp_path / "tokenizer.json", special=special))
    assert tokenizer.eos_id == (None if end is None else special.index(end))
    assert tokenizer.decode([*tokenizer.encode("ab"), *([tokenizer.eos_id] if end else [])]) == "ab"


def test_truncation_padding_and_templates_of_the_file_do_not_touch_the_corpus(tmp_path, build):
    from tokenizers import processors
    path = build(tmp_path / "tokenizer.json",
                 cut=lambda m: m.enable_truncation(4), pad=lambda m: m.enable_padding(length=64),
                 template=lambda m: setattr(m, "post_processor", processors.TemplateProcessing(
                     single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 1)])))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and 1 not in tokenizer.encode(TEXT)


def test_vocab_size_counts_the_largest_id_and_sets_the_dtype(tmp_path, build):
    path = pathlib.Path(build(tmp_path / "tokenizer.json"))
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70_000, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 70_000
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 70_001 and tokenizer.dtype == np.uint32
    assert load_tokenizer("bytes").dtype == np.uint16


def test_a_folder_stands_for_its_tokenizer_json_and_the_hash_follows_the_content(tmp_path, build):
    path = build(tmp_path / "tokenizer.json")
    one, other = load_tokenizer(path), load_tokenizer(str(tmp_path))
    assert one.sha256 == other.sha256 != load_tokenizer("bytes").sha256


@pytest.mark.parametrize("content, words", [
    (None, "neither 'bytes' nor a tokenizer.json"), ("{}", "is no Hugging Face tokenizer.json"),
    ("hello", "is no Hugging Face tokenizer.json")])
def test_what_is_no_tokenizer_is_refused(tmp_path, content, words):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DeclarationError, match="config.data.tokenizer") as error:
        load_tokenizer(str(path))
    assert words in str(error.value) and str(path) in str(error.value)


@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs ../shared/data/smollm2_tokenizer.json")
def test_a_published_tokenizer_reads_as_published():
    tokenizer = load_tokenizer(str(SMOLLM2))
    assert tokenizer.vocab_size == 49_152 and tokenizer.eos_id == 0 and tokenizer.dtype == np.uint16
    assert "".join(streamed(tokenizer, tokenizer.encode(TEXT))) == TEXT
