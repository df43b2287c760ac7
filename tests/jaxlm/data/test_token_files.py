"""The two binary forms of tokens that people have, read as they were written, and refused where they are damaged."""

import collections
import struct

import numpy as np
import pytest
import tokenizers

from jaxlm.config import DataConfig
from jaxlm.data import open_data
from jaxlm.data.token_files import MEGATRON, read_bin
from partitioning.declaration import DeclarationError

TOKENS = np.arange(1, 41) % 7


def read(path, dtype="auto", vocab_size=257):
    return read_bin(path, dtype=dtype, vocab_size=vocab_size, limit=300)


def ids(stream):
    return stream.read(0, len(stream)).tolist()


def write_megatron(folder, sizes, documents, dtype=np.uint16, code=8, name="c"):
    tokens = TOKENS[:sum(sizes)].astype(dtype)
    (folder / f"{name}.bin").write_bytes(tokens.tobytes())
    pointers = (np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize
    (folder / f"{name}.idx").write_bytes(
        MEGATRON + struct.pack("<QBQQ", 1, code, len(sizes), len(documents)) + np.array(sizes, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes() + np.array(documents, "<i8").tobytes())
    return folder / f"{name}.bin"


@pytest.mark.parametrize("dtype, vocab_size, declared", [
    ("uint16", 257, "auto"), ("uint32", 70_000, "auto"), ("uint32", 257, "uint32")])
def test_a_flat_file_is_its_ids(tmp_path, dtype, vocab_size, declared):
    TOKENS.astype(dtype).tofile(tmp_path / "a.bin")
    stream = read(tmp_path / "a.bin", declared, vocab_size)
    assert ids(stream) == TOKENS.tolist() and stream.documents is None and stream.bytes is None


@pytest.mark.parametrize("magic, dtype", [(20240520, np.uint16), (20240801, np.uint32)])
def test_a_header_says_the_width_and_the_count(tmp_path, magic, dtype):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(TOKENS)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + TOKENS.astype(dtype).tobytes())
    assert ids(read(tmp_path / "a.bin")) == TOKENS.tolist()
    with open(tmp_path / "a.bin", "ab") as handle:
        handle.truncate(1024 + 3)
    with pytest.raises(DeclarationError, match="its header says 40 tokens .* but 3 bytes follow"):
        read(tmp_path / "a.bin")


@pytest.mark.parametrize("dtype, code", [(np.uint16, 8), (np.int32, 4)])
def test_megatrons_index_says_where_documents_end(tmp_path, dtype, code):
    stream = read(write_megatron(tmp_path, [5, 3, 0, 4], [0, 2, 3, 4], dtype, code))
    assert ids(stream) == TOKENS[:12].tolist() and stream.ends.tolist() == [8, 12]


def test_ids_that_the_model_does_not_have_are_seen_when_a_file_is_opened(tmp_path):
    np.append(TOKENS, 300).astype(np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(DeclarationError, match="hold the id 300, but config.model.vocab_size = 300"):
        read(tmp_path / "a.bin")


def test_uint32_ids_are_not_read_as_uint16_without_a_word(tmp_path):
    for count in (8, 5000):
        np.arange(1, count + 1).astype(np.uint32).tofile(tmp_path / "wide.bin")
        with pytest.raises(DeclarationError, match="every second uint16 of it is 0, as in a file of uint32"):
            read_bin(tmp_path / "wide.bin", dtype="auto", vocab_size=300, limit=9000)
        assert len(read_bin(tmp_path / "wide.bin", dtype="uint32", vocab_size=300, limit=9000)) == count
        assert len(read_bin(tmp_path / "wide.bin", dtype="uint16", vocab_size=300, limit=9000)) == 2 * count
    odd = np.arange(5000) % 2
    for tokens in (odd + 1, 0 * odd, 1 - odd + (np.arange(5000) == 4999)):
        tokens.astype(np.uint16).tofile(tmp_path / "narrow.bin")
        assert len(read_bin(tmp_path / "narrow.bin", dtype="auto", vocab_size=300, limit=300)) == 5000


def test_damage_is_named(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(DeclarationError, match="3 bytes, which is no whole number of uint16"):
        read(tmp_path / "odd.bin")
    path = write_megatron(tmp_path, [5, 3], [0, 1, 2])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DeclarationError, match="has 14 bytes, but c.idx says 16"):
        read(path)
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:50])
    with pytest.raises(DeclarationError, match="It is cut off"):
        read(path)
    index.write_bytes(b"x" * 99)
    with pytest.raises(DeclarationError, match="is no index of Megatron's"):
        read(path)


def test_what_a_header_or_an_index_says_is_not_taken_on_trust(tmp_path):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 2, len(TOKENS)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + TOKENS.astype(np.uint16).tobytes())
    with pytest.raises(DeclarationError, match="a header of version 2; expected version 1"):
        read(tmp_path / "a.bin")
    for sizes, documents in (([10, -5, 30], [0, 3]), ([5, 3], [0, 100, 2]), ([5, 3], [0, 2, 1, 2]), ([5, 3], [0, -1, 2])):
        with pytest.raises(DeclarationError, match="c.idx is damaged"):
            read(write_megatron(tmp_path, sizes, documents))
    path = write_megatron(tmp_path, [5, 3], [0, 1, 2], np.int32, 4)
    path.write_bytes(np.array([1, 2, -1, 4, 5, 6, 7, 8], np.int32).tobytes())
    with pytest.raises(DeclarationError, match="hold the id -1"):
        read(path)


@pytest.mark.parametrize("written", [True, False])
def test_no_target_is_lost_where_documents_lack_the_beginning_token_that_is_declared(written, tmp_path):
    documents = [[*([7] if written and i % 2 else []), *([97 + i] * (i + 2)), 256] for i in range(9)]
    np.concatenate(documents).astype(np.uint16).tofile(tmp_path / "a.bin")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({{7: "<b>", 256: "<e>"}.get(i, f"w{i}"): i for i in range(257)}))
    tokenizer.add_special_tokens(["<b>", "<e>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = DataConfig(train=(str(tmp_path / "a.bin"),), sequence_length=8, eval_fraction=0.0, pack="best_fit", bos=True,
                        bos_token="<b>", eos_token="<e>", tokenizer=str(tmp_path / "tokenizer.json"))
    packed = open_data(config, 257).train
    rows = packed.gather(np.arange(len(packed)))
    wanted = [t for document in documents for t in document if t != 7]
    assert sorted(rows["targets"][rows["mask"]].tolist()) == sorted(wanted)
    firsts = rows["inputs"][(rows["positions"] == 0) & (rows["segment_ids"] > 0)]
    assert collections.Counter(firsts.tolist())[7] == len(documents)


def test_files_are_trained_on_in_both_ways_of_packing_and_their_end_is_held_out(tmp_path):
    text = b"".join(bytes([97 + i]) * (i + 2) for i in range(9))
    documents = np.concatenate([np.append(np.full(i + 2, 97 + i), 256) for i in range(9)]).astype(np.uint16)
    documents[:30].tofile(tmp_path / "a.bin")
    documents[30:].tofile(tmp_path / "b.bin")
    config = dict(train=(str(tmp_path / "*.bin"),), sequence_length=8, eval_fraction=0.0)
    split = open_data(DataConfig(**config), 257)
    rows = split.train.gather(np.arange(len(split.train)))
    assert sorted(rows["targets"][rows["mask"]].tolist()) == sorted(documents.tolist()) and split.train.bytes is None
    packed = open_data(DataConfig(**config, pack="best_fit"), 257)
    rows = packed.train.gather(np.arange(len(packed.train)))
    assert sorted(rows["targets"][rows["mask"]].tolist()) == sorted(documents.tolist())
    assert (rows["segment_ids"].max(axis=1) > 1).any() and set(rows["inputs"][rows["positions"] == 0].tolist()) >= {256}
    held = open_data(DataConfig(**{**config, "eval_fraction": 0.25}), 257)
    assert held.eval.targets == len(documents) - int(len(documents) * 0.75) and held.eval.bytes_per_target is None
    assert len(text) == len(documents) - 9


def test_tokens_beside_text_in_one_source_are_refused_and_in_a_mixture_not(tmp_path):
    TOKENS.astype(np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("hello world " * 9)
    names = str(tmp_path / "a.bin"), str(tmp_path / "b.txt")
    options = dict(sequence_length=8, eval_fraction=0.0)
    with pytest.raises(DeclarationError, match="has tokens .* beside text .* in one source"):
        open_data(DataConfig(train=names, **options), 257)
    data = open_data(DataConfig(train=tuple({"paths": n, "name": n[-5:], "weight": 1} for n in names), **options), 257)
    assert list(data.sources) == ["a.bin", "b.txt"] and data.train is None
    assert any("b.txt: 108 tokens" in line and "share 50.00%" in line for line in data.lines())
    with pytest.raises(DeclarationError, match="does not say which of its tokens are targets"):
        open_data(DataConfig(train=names[:1], content="chat", chat_template="{{ 1 }}", **options), 257)
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(DeclarationError, match="holds no tokens"):
        open_data(DataConfig(train=(str(tmp_path / "empty.bin"),), **options), 257)
