"""Text to ids and back, whole and id by id."""

import base64
import json
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.data.tokenizer import load_tokenizer
from partitioning.declaration import DeclarationError

SHARED = pathlib.Path(__file__).parents[4] / "shared" / "data"
SMOLLM2 = SHARED / "smollm2_tokenizer.json"
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
    assert tokenizer.vocab_size == 49_152 and tokenizer.dtype == np.uint16
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2), "as the configuration beside it says"
    assert tokenizer.chat_template.startswith("{% for message in messages %}")
    assert tokenizer.with_ends(None, "<|endoftext|>").eos_id == 0
    assert "".join(streamed(tokenizer, tokenizer.encode(TEXT))) == TEXT


GPT2 = pytest.mark.skipif(not (SHARED / "gpt2_encoder.json").exists(), reason="needs ../shared/data/gpt2_encoder.json")
TRICKY = "  \n\n  a's I'LL 12345 ... !!\r\n\t日本語 🙂👩‍🚀 don't <|endoftext|>"


@GPT2
def test_gpt2s_two_files_are_one_tokenizer_whichever_is_named():
    one, other = (load_tokenizer(str(SHARED / name)) for name in ("gpt2_encoder.json", "gpt2_vocab.bpe"))
    assert one.sha256 == other.sha256 and (one.vocab_size, one.eos_id) == (50_257, 50_256)
    assert one.encode("Hello world, hello.").tolist() == [15496, 995, 11, 23748, 13]
    assert one.encode(TRICKY).tolist()[-1] == 50_256 and one.decode(one.encode(TRICKY)) == TRICKY.removesuffix("<|endoftext|>")


@GPT2
def test_ranks_give_the_tokens_of_the_merges_that_they_were_made_from(tmp_path):
    from jaxlm.data.tokenizer_files import _printable_bytes
    byte_of = {character: byte for byte, character in _printable_bytes().items()}
    words = {word: i for word, i in json.loads((SHARED / "gpt2_encoder.json").read_text()).items() if i != 50_256}
    lines = [base64.b64encode(bytes(byte_of[c] for c in word)).decode() + f" {i}" for word, i in words.items()]
    (tmp_path / "r50k_base.tiktoken").write_text("\n".join(lines) + "\n")
    ranks, merges = load_tokenizer(str(tmp_path)), load_tokenizer(str(SHARED / "gpt2_encoder.json"))
    text = TRICKY + (SHARED / "austen.txt").read_text()[:200_000]
    assert ranks.encode(text).tolist() == merges.encode(text).tolist() and ranks.eos_id == 50_256
    (tmp_path / "r50k_base.tiktoken").rename(tmp_path / "mine.tiktoken")
    with pytest.raises(DeclarationError, match="how text is split into words; its name does"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "gpt2.tiktoken").write_text("aGVsbG8= 1\nhello world\n")
    with pytest.raises(DeclarationError, match="gpt2.tiktoken:2 is no token in base64"):
        load_tokenizer(str(tmp_path / "gpt2.tiktoken"))


@GPT2
def test_a_long_document_is_cut_where_its_tokens_stay_the_same(monkeypatch):
    from jaxlm.data.tokenizer import pieces_of
    tokenizer = load_tokenizer(str(SHARED / "gpt2_encoder.json"))
    text = (SHARED / "austen.txt").read_text()[:300_000]
    pieces = list(pieces_of(text, tokenizer._ids, 10_000))
    assert "".join(pieces) == text and len(pieces) > 20
    ids = [i for piece in pieces for i in tokenizer._ids([piece])[0]]
    assert ids == tokenizer.model.encode(text, add_special_tokens=False).ids
    assert list(pieces_of("x" * 10_000, tokenizer._ids, 100)) == ["x" * 10_000], "no place, no cut"
    monkeypatch.setattr(pieces_of, "__defaults__", (10_000,))
    found = tokenizer.encode_documents([b"one", text.encode(), b"", b"two"])
    assert [len(found[0]), found[1].tolist(), len(found[2]), len(found[3])] == [1, ids, 0, 1], "and a document is whole again"
    assert {array.dtype for array in found} == {np.dtype(np.uint16)}


def test_a_sentencepiece_model_reads_as_its_own_library_does(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text((TEXT + "a few words more\n") * 50, "utf-8")
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"),
                                             vocab_size=320, hard_vocab_limit=False, byte_fallback=True, minloglevel=2)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    assert (tokenizer.kind, tokenizer.bos_id, tokenizer.eos_id) == ("sentencepiece", 1, 2)
    assert tokenizer.vocab_size == tokenizer.model.vocab_size()
    ids = tokenizer.encode(TEXT.strip())
    assert ids.tolist() == tokenizer.model.encode(TEXT.strip()) and "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
    assert tokenizer.decode([*tokenizer.encode("a few"), 2]) == "a few"
    ids, places = tokenizer.encode_with_offsets("a few words")
    assert len(ids) == len(places) and places[0, 0] == 0 and places[-1, 1] == 11


def test_a_format_whose_package_is_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(DeclarationError, match="pip install 'jaxlm\\[data\\]'"):
        load_tokenizer(str(tmp_path / "tokenizer.model"))


def test_the_configuration_beside_a_tokenizer_names_its_ends_and_its_template(tmp_path, build):
    path = build(tmp_path / "tokenizer.json", special=("<a>", "<b>", "<|endoftext|>"))
    assert (load_tokenizer(path).bos_id, load_tokenizer(path).eos_id) == (None, 2)
    config = {"bos_token": {"content": "<a>"}, "eos_token": "<b>", "chat_template": [{"name": "default", "template": "T"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (0, 1, "T")
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(str(tmp_path)).chat_template == "own file"
    assert tokenizer.with_ends("<b>", "<a>").bos_id == 1
    with pytest.raises(DeclarationError, match="config.data.eos_token = '<c>' is no special token"):
        tokenizer.with_ends(None, "<c>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DeclarationError, match="tokenizer_config.json, beside the tokenizer, cannot be read"):
        load_tokenizer(path)


def test_ids_come_with_the_places_where_they_begin_and_end(tokenizer):
    ids, places = tokenizer.encode_with_offsets("aé b")
    assert places.shape == (len(ids), 2) and places[0].tolist() == [0, 1] and places[-1].tolist() == [3, 4]
    assert tokenizer.encode_with_offsets("")[1].shape == (0, 2)
