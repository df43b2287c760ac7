"""Files become documents in a fixed order, and every mistake in them is named."""

import gzip
import hashlib
import json
import sys

import pytest

from jaxlm.data.files import EMBEDDED, File
from jaxlm.data.sources import Counts, documents_of, read_corpus, text_extract
from jaxlm.data.tokenizing import _sha256
from partitioning.declaration import DeclarationError


def read(*names, text_field="text", on_bad_record="fail"):
    return read_corpus([str(n) for n in names], text_field=text_field, on_bad_record=on_bad_record, key="config.data.train")


def message(*names, **options):
    with pytest.raises(DeclarationError) as error:
        read(*names, **options)
    return str(error.value)


@pytest.fixture
def notes(tmp_path):
    for name, text in (("b.txt", "second"), ("a.txt", "first\r\n"), ("sub/c.txt", "third\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def test_a_glob_is_sorted_and_a_text_file_is_one_document_kept_byte_for_byte(notes):
    assert read(notes / "*.txt").documents == (b"first\r\n", b"second")
    assert read(notes / "**" / "*.txt").documents == (b"first\r\n", b"second", b"third\n")


def test_names_keep_their_order_and_a_file_named_twice_is_read_once(notes):
    corpus = read(notes / "b.txt", notes / "*.txt", notes / "b.txt")
    assert corpus.documents == (b"second", b"first\r\n")
    assert [f.rsplit("/", 1)[-1] for f in corpus.files] == ["b.txt", "a.txt"]
    (notes / "link.txt").symlink_to(notes / "b.txt")
    assert read(notes / "b.txt", f"{notes}/../{notes.name}/b.txt", notes / "link.txt").documents == (b"second",)


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path):
    (tmp_path / "a[1].txt").write_text("here")
    assert read(tmp_path / "a[1].txt").documents == (b"here",)


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path / "a.txt").documents == (b"hello",)


def test_each_json_line_is_a_document_whatever_else_may_end_a_line(tmp_path):
    lines = [json.dumps({"body": "one\u2028still one\nline"}, ensure_ascii=False), "", json.dumps({"body": "zwei ü"}),
             json.dumps({"body": "  "})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\r\n", "utf-8")
    corpus = read(tmp_path / "a.jsonl", text_field="body")
    assert corpus.documents == ("one\u2028still one\nline".encode(), "zwei ü".encode())
    assert corpus.blank == 1 and corpus.skipped == 0


@pytest.mark.parametrize("line, words", [
    (b"{not json", "is not JSON"),
    (b"[1]", "expected an object with the field that"),
    (b'{"body": "x", "id": 3}', "has no field 'text' (its fields: 'body', 'id'); config.data.text_field"),
    (b'{"text": 3}', "has int in the field 'text'; expected a string"),
    (b'{"text": "\xff"}', "is not UTF-8: byte 0xff at offset 10"),
    (b'{"text": "\\ud800"}', "half a surrogate pair"),
    (b"[" * 100_000, "is not JSON"),
])
def test_a_bad_record_is_named_by_file_and_line_or_skipped_and_counted(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "fine"}')
    said = message(path)
    assert said.startswith(f"{path}:3 ") and words in said and "config.data.on_bad_record='skip'" in said
    corpus = read(path, on_bad_record="skip")
    assert corpus.documents == (b"good", b"fine") and corpus.skipped == 1


def test_missing_files_and_patterns_without_match_are_named_with_a_way_out(notes):
    assert "there is no file" in message(notes / "bb.txt") and "did you mean 'b.txt'?" in message(notes / "bb.txt")
    assert "no file matches" in message(notes / "*.jsonl") and str(notes / "*.jsonl") in message(notes / "*.jsonl")
    assert "is a folder" in message(notes) and "**/*.txt" in message(notes)
    assert "did you mean 'shakespeare'" in message("embedded:shakespear")
    assert "config.data.train is empty" in message()


@pytest.mark.parametrize("name", ["a.csv", "a.bin.gz", "README"])
def test_unknown_kinds_of_files_are_refused_even_when_a_glob_matches_them(tmp_path, name):
    (tmp_path / name).write_text("x")
    for said in (message(tmp_path / name), message(tmp_path / "*")):
        assert name in said and "expected .txt (one document) or .jsonl" in said


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path):
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin1"))
    assert "is not UTF-8: byte 0xef at offset 2" in message(tmp_path / "a.txt")
    assert "iconv -f LATIN1" in message(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes("naïve".encode("utf-16"))
    assert "iconv -f UTF-16" in message(tmp_path / "a.txt")


def test_a_named_file_without_text_is_refused_and_one_in_a_glob_is_left_out(notes):
    (notes / "empty.txt").write_text("")
    (notes / "e2.jsonl").write_text("3\n")
    assert "empty.txt has no text (0 bytes)" in message(notes / "empty.txt")
    assert "1 bad records skipped" in message(notes / "e2.jsonl", on_bad_record="skip")
    (notes / "blank.txt").write_text(" \n")
    corpus = read(notes / "*.txt")
    assert corpus.documents == (b"first\r\n", b"second") and corpus.blank == 2
    assert "has no text: 2 files" in message(notes / "[e]*[y].txt", notes / "bl*.txt")


def test_a_file_that_cannot_be_read_says_so(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    def refuse(*_):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("builtins.open", refuse)
    assert "cannot be read: Permission denied" in message(tmp_path / "a.txt")


def test_the_packaged_text_is_whole_plays_and_about_a_megabyte():
    (text,) = read("embedded:shakespeare").documents
    assert len(text) == 1_011_276
    assert text.startswith(b"A Midsummer Night's Dream\n") and text.endswith(b"two princes, and a queen.\n")
    assert text.count(b"\n\nACT I\n") == 9
    folder = EMBEDDED["shakespeare"].parent
    assert "public domain" in (folder / "README.md").read_text() and "MIT" in (folder / "README.md").read_text()
    assert "Sean Stewart" in (folder / "LICENSE-shakespeare").read_text()


RECORDS = [{"text": "zwei ü"}, {"text": "  "}, {"text": "three"}]
LINES = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS).encode()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_compressed_files_are_read_as_what_is_in_them(tmp_path, name):
    if name.endswith(".gz"):
        pack = gzip.compress
    else:
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
    content = pack(LINES)
    (tmp_path / name).write_bytes(content + pack(LINES[:0]))
    assert read(tmp_path / name).documents == ((LINES,) if "txt" in name else ("zwei ü".encode(), b"three"))
    (tmp_path / name).write_bytes(content[:-6])
    assert "cannot be read" in message(tmp_path / name), "cut off"


def test_parquet_and_data_sets_on_disk_are_a_document_per_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    table = arrow.table({"id": [1, 2, 3, 4], "text": ["zwei ü", "  ", None, "three"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    folder = tmp_path / "dataset"
    folder.mkdir()
    name = str(folder / "data-00000-of-00001.arrow")
    with arrow.OSFile(name, "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    for name, place in ((tmp_path / "a.parquet", f"{tmp_path / 'a.parquet'}: row 3"), (folder, f"{folder}: row 3")):
        assert message(name).startswith(f"{place} has NoneType in the field 'text'")
        corpus = read(name, on_bad_record="skip")
        assert corpus.documents == ("zwei ü".encode(), b"three") and (corpus.skipped, corpus.blank) == (1, 1)
        assert "has no field 'body' (its fields: 'id', 'text')" in message(name, text_field="body")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "cannot be read" in message(tmp_path / "a.parquet")
    (folder / "data-00000-of-00001.arrow").unlink()
    assert "data-00000-of-00001.arrow cannot be read" in message(folder)
    (folder / "state.json").rename(folder / "dataset_dict.json")
    assert "of several splits" in message(folder)


def test_a_value_that_cannot_be_had_is_a_bad_record_where_it_is_the_text_and_nothing_where_it_is_not(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    broken = arrow.Array.from_buffers(arrow.string(), 3, arrow.array([b"one", b"\xff\xfe", b"three"]).buffers())
    times = arrow.array([1, 2, 3], arrow.timestamp("ns"))
    pyarrow.parquet.write_table(arrow.table({"text": broken, "at": times}), tmp_path / "a.parquet")
    assert "a.parquet: row 2 has a value in the field 'text' that cannot be read" in message(tmp_path / "a.parquet")
    corpus = read(tmp_path / "a.parquet", on_bad_record="skip")
    assert corpus.documents == (b"one", b"three") and corpus.skipped == 1


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-that-name/a.txt"])
def test_a_name_that_no_file_can_have_is_a_file_that_is_not_there(name):
    assert "there is no file" in message(name)


def test_array_records_are_objects_or_texts(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "a.arrayrecord"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in ("zwei ü".encode(), b'{"text": "three"}', b"\xff", b" "):
        writer.write(record)
    writer.close()
    assert message(path).startswith(f"{path}: record 3 is not UTF-8")
    corpus = read(path, on_bad_record="skip")
    assert corpus.documents == ("zwei ü".encode(), b"three") and (corpus.skipped, corpus.blank) == (1, 1)


def test_urls_are_read_through_fsspec_with_globs():
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for name, content in (("b.txt", b"second"), ("a.jsonl", LINES), ("c.jsonl.gz", gzip.compress(LINES))):
        system.pipe_file(f"/corpus/{name}", content)
    assert read("memory://corpus/*.jsonl", "memory://corpus/b.txt").documents == ("zwei ü".encode(), b"three", b"second")
    assert len(read("memory://corpus/**").documents) == 5
    assert "there is no file 'memory://corpus/d.txt'" in message("memory://corpus/d.txt")
    assert "no file matches 'memory://corpus/*.parquet'" in message("memory://corpus/*.parquet")
    assert "nosuch://" in message("nosuch://x/a.txt")
    stored = system.cat_file("/corpus/c.jsonl.gz")
    assert _sha256(File("memory://corpus/c.jsonl.gz")) == hashlib.sha256(stored).hexdigest(), "of a cache's source, as stored"


def test_a_part_of_a_file_is_the_lines_that_begin_in_it(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"line {i} " + "é" * i}, ensure_ascii=False).encode() + b"\n" for i in range(30)]
    path.write_bytes(b"".join(lines))
    size = path.stat().st_size
    for step in (1, 7, 40, 41, 1000, size):
        spans = [(begin, min(begin + step, size)) for begin in range(0, size, step)]
        parts = [text for span in spans for text in documents_of(File(str(path)), text_extract("text"), "fail", Counts(), span)]
        assert parts == list(read(path).documents)


def test_a_text_that_is_not_utf8_may_be_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_bytes(b"good")
    corpus = read(tmp_path / "*.txt", on_bad_record="skip")
    assert corpus.documents == (b"good",) and corpus.skipped == 1


@pytest.mark.parametrize("name, package", [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_what_needs_a_package_names_the_extra(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    said = message(tmp_path / name)
    assert f"needs the package {package}, which is not installed; pip install 'jaxlm[data]'" in said and name in said
