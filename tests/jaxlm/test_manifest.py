"""The manifest: every kind of damage to every file is seen and named."""

import os

import pytest

from jaxlm import manifest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK", 64)
    (tmp_path / "state" / "d").mkdir(parents=True)
    (tmp_path / "state" / "d" / "abc").write_bytes(bytes(range(200)))
    (tmp_path / "about").write_bytes(b"{}")
    (tmp_path / "empty").write_bytes(b"")
    manifest.write(tmp_path)
    return tmp_path


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_what_was_written_is_whole_and_a_file_that_is_not_ours_is_no_damage(folder):
    assert manifest.verify(folder) == []
    (folder / "notes.txt").write_text("mine")
    assert manifest.verify(folder) == []


def test_every_flipped_bit_is_seen(folder):
    path = folder / "state" / "d" / "abc"
    for bit in range(8 * 200):
        flip(path, bit)
        start = bit // 8 // 64 * 64
        assert manifest.verify(folder) == [
            f"state/d/abc is not as it was written, between the bytes {start} and {min(start + 64, 200)}"]
        flip(path, bit)


def test_every_flipped_bit_of_the_manifest_itself_is_seen(folder):
    path = folder / manifest.NAME
    for bit in range(8 * path.stat().st_size):
        flip(path, bit)
        assert len(manifest.verify(folder)) == 1 and manifest.verify(folder)[0].startswith(manifest.NAME), bit
        flip(path, bit)


@pytest.mark.parametrize("damage, words", [
    (lambda path: path.unlink(), "state/d/abc is missing"),
    (lambda path: os.truncate(path, 199), "state/d/abc has 199 bytes, not 200"),
    (lambda path: os.truncate(path, 0), "state/d/abc has 0 bytes, not 200"),
    (lambda path: path.write_bytes(bytes(200)), "state/d/abc is not as it was written, between the bytes 0 and 64"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "state/d/abc has 201 bytes, not 200"),
    (lambda path: (path.unlink(), path.mkdir()), "state/d/abc "),
])
def test_damage_to_a_file_is_named(folder, damage, words):
    damage(folder / "state" / "d" / "abc")
    assert manifest.verify(folder)[0].startswith(words)


def test_a_manifest_that_is_missing_is_damage(folder):
    (folder / manifest.NAME).unlink()
    assert manifest.verify(folder) == ["manifest.json is missing"]


def test_the_shares_of_processes_are_all_blocks_once(folder, monkeypatch):
    read = []
    whole = manifest._checksums
    monkeypatch.setattr(manifest, "_checksums", lambda folder, blocks, size: read.append(blocks) or whole(folder, blocks, size))
    assert all(manifest.verify(folder, part, 3) == [] for part in range(3))
    assert sorted(block for blocks in read for block in blocks) == [("about", 0), *(("state/d/abc", i) for i in range(4))]
    flip(folder / "state" / "d" / "abc", 8 * 130)
    assert [len(manifest.verify(folder, part, 3)) for part in range(3)].count(1) == 1
