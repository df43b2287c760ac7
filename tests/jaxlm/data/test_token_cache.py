"""A cache holds what training on the text itself would read, however it was made and however often it was killed meanwhile."""

import contextlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxlm import tokenize
from jaxlm.commandline import run
from jaxlm.config import DataConfig
from jaxlm.data import corpus as corpus_module
from jaxlm.data import open_data, token_cache, tokenizing
from partitioning.declaration import DeclarationError
from tests.system.commands import environment

SHARED = pathlib.Path(__file__).parents[4] / "shared" / "data"


def make(out, *names, status=0, **options):
    words = [f"--config.data.{name}={value}" for name, value in options.items()]
    train = f"--config.data.train={tuple(map(str, names))!r}"
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        assert run(tokenize.main, tokenize.arguments(), [train, f"--out={out}", "--workers=1", *words]) == status, text.getvalue()
    return text.getvalue()


def rows(config):
    data = open_data(config, 300)
    found = {"train": data.train, "eval": data.eval}
    out = {name: examples.gather(np.arange(len(examples))) for name, examples in found.items() if examples}
    return out, data


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "SMALLEST", 300)      # small parts of a small corpus
    texts = [f"Document {i}: " + "naïve café 🙂 " * (i % 7 + 1) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n\n" for t in texts), "utf-8")
    (tmp_path / "b.txt").write_text("One more, in a file of its own.", "utf-8")
    return tmp_path / "a.jsonl", tmp_path / "b.txt"


@pytest.mark.parametrize("tokenizer", ["bytes", "byte_level"])
@pytest.mark.parametrize("pack", ["split", "best_fit"])
def test_a_cache_is_trained_on_as_the_text_is(tmp_path, corpus, build, tokenizer, pack):
    if tokenizer != "bytes":
        tokenizer = build(tmp_path / "tokenizer.json")
    said = make(tmp_path / "cache", *corpus, tokenizer=tokenizer)
    assert "61 documents" in said and f"--config.data.train={tmp_path / 'cache'}" in said
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    assert [source["documents"] for source in manifest["sources"]] == [60, 1] and len(manifest["sources"][1]["sha256"]) == 64
    assert not (tmp_path / "cache" / "parts").exists()
    options = dict(tokenizer=tokenizer, sequence_length=16, pack=pack, eval_fraction=0.0)
    (of_text, text), (of_cache, cache) = (rows(DataConfig(train=tuple(map(str, names)), **options))
                                          for names in (corpus, (tmp_path / "cache",)))
    for name, array in of_text["train"].items():
        assert np.array_equal(of_cache["train"][name], array), name
    assert cache.train.bytes == text.train.bytes
    assert "finished" not in make(tmp_path / "cache", *corpus, tokenizer=tokenizer), "made again, it is there already"


def test_the_end_of_a_cache_is_held_out_with_its_bytes_counted(tmp_path, corpus):
    make(tmp_path / "cache", *corpus)
    _, data = rows(DataConfig(train=(str(tmp_path / "cache"),), sequence_length=16, eval_fraction=0.3))
    ends = (data.eval.stream.read(0, len(data.eval.stream)) == 256).sum()
    assert data.eval.bytes == data.eval.targets - ends, "a byte a token, but for the end tokens"
    assert data.train.bytes + data.eval.bytes == sum(len(json.loads(line)["text"].encode()) for line in
                                                     corpus[0].read_text("utf-8").split("\n\n") if line) + 31


@pytest.mark.parametrize("tokenizer", ["bytes", "byte_level"])
def test_the_bytes_of_a_document_that_is_cut_are_counted_in_pieces(tmp_path, monkeypatch, build, tokenizer):
    """Pieces that end inside characters, and characters of several tokens, count as the whole does."""
    if tokenizer != "bytes":
        tokenizer = build(tmp_path / "tokenizer.json")
    text = tmp_path / "a.txt"
    text.write_text("naïve café 🙂🙂 \ufffd ü" * 40, "utf-8")
    make(tmp_path / "cache", text, tokenizer=tokenizer)
    counted = []
    for size in (1 << 20, 7, 5, 1):
        monkeypatch.setattr(corpus_module, "DECODED", size)
        config = DataConfig(train=(str(tmp_path / "cache"),), tokenizer=tokenizer, sequence_length=16, eval_fraction=0.3)
        data = open_data(config, 300)
        counted.append((data.train.bytes, data.eval.bytes))
    assert len(set(counted)) == 1 and sum(counted[0]) == text.stat().st_size


def test_one_document_has_no_end_token_and_chats_keep_their_targets(tmp_path, corpus):
    make(tmp_path / "one", corpus[1])
    (of_text, _), (of_cache, _) = (rows(DataConfig(train=(str(name),), sequence_length=8, eval_fraction=0.0))
                                   for name in (corpus[1], tmp_path / "one"))
    assert np.array_equal(of_text["train"]["targets"], of_cache["train"]["targets"])
    pytest.importorskip("jinja2")
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"prompt": f"How much is {i}?", "completion": f"It is {i}."}) + "\n" for i in range(20)))
    options = dict(content="chat", chat_template="{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}"
                   "{% endgeneration %}{% endfor %}")
    assert "--config.data.content=chat" in make(tmp_path / "chats", chat, **options)
    with pytest.raises(DeclarationError, match="was made with content = 'chat', but the configuration says 'text'"):
        rows(DataConfig(train=(str(tmp_path / "chats"),), sequence_length=8))
    options |= dict(sequence_length=64, eval_fraction=0.0, pack="best_fit")
    (of_text, _), (of_cache, _) = (rows(DataConfig(train=(str(name),), **options)) for name in (chat, tmp_path / "chats"))
    assert all(np.array_equal(of_text["train"][name], of_cache["train"][name]) for name in of_text["train"])
    assert 0 < of_cache["train"]["mask"].sum() < (of_cache["train"]["segment_ids"] > 0).sum()


def test_a_cache_that_is_not_what_its_manifest_says_is_refused(tmp_path, corpus, build):
    cache = tmp_path / "cache"
    make(cache, *corpus)
    def refused(match, **options):
        with pytest.raises(DeclarationError, match=match):
            open_data(DataConfig(**{"train": (str(cache),), "sequence_length": 8, **options}), 300)
    refused("is another .* set the one it was made with", tokenizer=build(tmp_path / "tokenizer.json"))
    refused("was made with eos = True, but the configuration says False", eos=False)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert run(tokenize.main, tokenize.arguments(), ["--check", f"--out={cache}"]) == 0
    assert "every byte is as it was written" in text.getvalue()
    tokens = bytearray((cache / "tokens.bin").read_bytes())
    (cache / "tokens.bin").write_bytes(tokens[:-2])
    refused("tokens.bin has .* bytes, not")
    tokens[len(tokens) // 2] ^= 1
    (cache / "tokens.bin").write_bytes(tokens)
    refused("tokens.bin is not as it was written")
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**manifest, "documents": 1}))
    refused("its checksum differs")
    (cache / "manifest.json").unlink()
    (cache / "plan.json").write_text("{}")
    refused("is an unfinished token cache; run the same python -m jaxlm.tokenize again")


def test_one_changed_byte_anywhere_is_seen_when_a_cache_is_opened(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(token_cache, "SAMPLE", 1)
    make(tmp_path / "cache", *corpus)
    config = DataConfig(train=(str(tmp_path / "cache"),), sequence_length=8)
    dice = random.Random()
    for name in ("tokens.bin", "ends.bin", "byte_ends.bin", "manifest.json"):
        content = (tmp_path / "cache" / name).read_bytes()
        place, changed = dice.randrange(len(content)), bytearray(content)
        changed[place] ^= 1 << dice.randrange(7)
        (tmp_path / "cache" / name).write_bytes(changed)
        with pytest.raises(DeclarationError, match="not as it was written|as it was written: "):
            open_data(config, 300)
            raise AssertionError(f"{name}: byte {place} has changed")
        (tmp_path / "cache" / name).write_bytes(content)
    assert open_data(config, 300).train.targets > 1000


def test_two_processes_do_not_make_one_cache_and_half_a_beginning_is_no_hindrance(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(tokenizing, "PATIENCE", 0)
    out = tmp_path / "cache"
    out.mkdir()
    (out / "plan.json.draft").write_text("{")          # of one that was killed as it began
    def second(*_):
        assert "another process is making" in make(out, *corpus, status=2)
        return make_part(*_)
    make_part = tokenizing._make_part
    monkeypatch.setattr(tokenizing, "_make_part", second)
    assert "61 documents" in make(out, *corpus)


def test_what_lies_in_the_way_is_not_overwritten(tmp_path, corpus):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("x")
    assert "holds no token cache" in make(tmp_path / "mine", *corpus, status=2)
    make(tmp_path / "cache", *corpus)
    assert "of other text, another tokenizer or other options" in make(tmp_path / "cache", corpus[1], status=2)
    assert "holds tokens already" in make(tmp_path / "again", tmp_path / "cache", status=2)
    assert "gives pairs" in make(tmp_path / "again", *corpus, status=2, content="preference")
    for words in ([], ["--train"]):
        arguments = [f"--config.data.train={corpus[0]}", f"--out={corpus[1]}", *words]
        assert run(tokenize.main, tokenize.arguments(), arguments) == 2
    assert "cannot be made: Not a directory" in make(tmp_path / "mine" / "notes.md" / "x", *corpus, status=2)
    (tmp_path / "empty.txt").write_text("")
    arguments = ["--train", f"--config.data.train={tmp_path / 'empty.txt'}", f"--out={tmp_path / 'no'}"]
    assert run(tokenize.main, tokenize.arguments(), arguments) == 2
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("workers, content", [(3, "text"), (10, "text"), (2, "chat")])
def test_any_number_of_threads_or_processes_makes_the_same_cache(tmp_path, corpus, monkeypatch, build, workers, content):
    monkeypatch.setattr(tokenizing, "SMALLEST", 600)
    talks = [json.dumps({"prompt": f"Question {i}?", "completion": "yes " * (i % 9 + 1)}) + "\n" for i in range(60)]
    (tmp_path / "talks.jsonl").write_text("".join(talks))
    names, options = ((corpus[0],), {}) if content == "text" else ((tmp_path / "talks.jsonl",), {
        "content": "chat", "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"})
    options["tokenizer"] = build(tmp_path / "tokenizer.json")
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    make(tmp_path / "one", *names, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        words = [f"--config.data.{name}={value}" for name, value in options.items()]
        command = [f"--config.data.train={names[0]}", f"--out={tmp_path / 'several'}", f"--workers={workers}", *words]
        assert run(tokenize.main, tokenize.arguments(), command) == 0
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "several" / path.name).read_bytes(), path.name


def test_a_data_sets_folder_is_known_by_its_contents(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    found = []
    for i, text in enumerate(("one", "two")):
        folder = tmp_path / f"dataset{i}"
        folder.mkdir()
        with arrow.OSFile(str(folder / "data.arrow"), "wb") as sink:
            table = arrow.table({"text": [text]})
            with arrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        make(tmp_path / f"cache{i}", folder)
        found.append(token_cache.read_manifest(tmp_path / f"cache{i}")["sources"][0]["sha256"])
    assert len(found[0]) == 64 and found[0] != found[1]


def test_a_bad_record_stops_it_or_is_counted(tmp_path, corpus):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"text": \n' + '{"text": " "}\n')
    assert "bad.jsonl:2 is not JSON" in make(tmp_path / "cache", bad, status=2)
    said = make(tmp_path / "cache", bad, on_bad_record="skip")
    assert "1 bad records were skipped" in said and "1 documents without text" in said
    assert "1 bad records skipped, and config.data.on_bad_record = 'fail'" in make(tmp_path / "cache", bad, status=2)


def test_parts_with_bad_records_are_made_again_where_none_is_taken(tmp_path, monkeypatch):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"text": \n')
    def stop(*_):
        raise DeclarationError("stopped before the end")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "_finish", stop)
        make(tmp_path / "cache", bad, status=2, on_bad_record="skip")
    assert "bad.jsonl:2 is not JSON" in make(tmp_path / "cache", bad, status=2)
    make(tmp_path / "cache", bad, on_bad_record="skip")
    assert (tmp_path / "cache" / token_cache.CACHE).exists()


@pytest.mark.skipif(not (SHARED / "austen.txt").exists(), reason="needs ../shared/data/austen.txt")
def test_killed_at_random_moments_it_goes_on_and_ends_the_same(tmp_path):
    """kill -9 of the command; its workers end with it, and the cache is the one of a run that nobody disturbed."""
    text = (SHARED / "austen.txt").read_text("utf-8")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text[i:i + 2000]}) + "\n" for i in range(0, len(text), 2000)), "utf-8")
    command = [sys.executable, "-m", "jaxlm.tokenize", f"--config.data.train={corpus}",
               f"--config.data.tokenizer={SHARED / 'gpt2_encoder.json'}", "--workers=2"]
    dice, kills, parts = random.Random(0), 0, tmp_path / "killed" / "parts"
    while kills < 2:
        process = subprocess.Popen([*command, f"--out={tmp_path / 'killed'}"], env=environment(), stdout=subprocess.DEVNULL)
        wanted = len(list(parts.glob("*.json"))) + 1
        while process.poll() is None and len(list(parts.glob("*.json"))) < wanted:
            time.sleep(0.005)
        time.sleep(dice.random() / 5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    subprocess.run([*command, f"--out={tmp_path / 'killed'}"], env=environment(), check=True, stdout=subprocess.DEVNULL)
    alone = [*command, f"--out={tmp_path / 'whole'}", "--workers=1"]
    subprocess.run(alone, env=environment(), check=True, stdout=subprocess.DEVNULL)
    for name in ("tokens.bin", "ends.bin", "byte_ends.bin", "manifest.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert {p.name for p in (tmp_path / "killed").iterdir()} == {"tokens.bin", "ends.bin", "byte_ends.bin", "manifest.json"}


def test_a_tokenizer_is_trained_on_a_corpus_and_read_again(tmp_path, corpus):
    out = tmp_path / "bpe"
    words = ["--train", "--vocab_size=300", f"--out={out}", f"--config.data.train={corpus[0]}"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert run(tokenize.main, tokenize.arguments(), words) == 0
    assert "300 ids" in text.getvalue()
    made = (out / "tokenizer.json").read_bytes()
    assert run(tokenize.main, tokenize.arguments(), words) == 2 and (out / "tokenizer.json").read_bytes() == made
    data = open_data(DataConfig(train=(str(corpus[0]),), tokenizer=str(out), sequence_length=16), 300)
    assert data.tokenizer.eos_id == 0 and data.train.bytes / data.train.targets > 1.5
    shutil.rmtree(out)
