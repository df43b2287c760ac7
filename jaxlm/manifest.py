"""The manifest of a checkpoint: the size of each of its files and a checksum of every block, so that damage is seen and named.

It is written into the checkpoint before this gets its final name, when all that restoring reads is there. So a checkpoint is
complete with its manifest, or is not there at all. The array libraries have no checksums of their own: they load a flipped bit
as a number.
"""

import concurrent.futures
import json
import os
import pathlib
import zlib

NAME = "manifest.json"
# Orbax writes these two last, and nothing in them is needed.
NOT_IN_IT = (NAME, "_CHECKPOINT_METADATA", "commit_success.txt")
BLOCK = 2**24                  # bytes to one checksum: a place that can be named, and work to share out

Block = tuple[str, int]        # a file's path in the checkpoint, and the number of the block in it


def write(folder: pathlib.Path) -> None:
    """Reads the files below `folder` once and writes the manifest, durably."""
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {name: size for name, size in files.items() if name not in NOT_IN_IT}
    blocks = [(name, i) for name, size in files.items() for i in range(_count(size, BLOCK))]
    sums: dict[str, list[str]] = {name: [] for name in files}
    for (name, _), found in zip(blocks, _checksums(folder, blocks, BLOCK), strict=True):
        if isinstance(found, OSError):
            raise found
        sums[name].append(found)
    for name in files:         # where the library that wrote it has not seen to that
        _to_disk(folder / name)
    body = {"block_bytes": BLOCK, "files": {name: {"bytes": files[name], "crc32": sums[name]} for name in files}}
    draft = folder / f"{NAME}.draft"
    with open(draft, "w", encoding="utf-8") as handle:
        json.dump({"crc32": _of(body), **body}, handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(draft, folder / NAME)
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        _to_disk(inner)
    _to_disk(folder)           # the names too


def _to_disk(path: pathlib.Path) -> None:
    """Returns when a file's bytes, or the names in a folder, would survive the loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify(folder: pathlib.Path, part: int = 0, parts: int = 1) -> list[str]:
    """Reads a share of the blocks (those whose number is `part` modulo `parts`) and says what is wrong with them.

    Returns:
      One line for each damage, empty if there is none: a file that is missing or has another size, the bytes of a block that are
      not those that were written, a manifest that is missing or damaged itself.
    """
    try:
        text = (folder / NAME).read_text("utf-8")
    except FileNotFoundError:
        return [f"{NAME} is missing"]
    except (OSError, ValueError) as error:
        return [f"{NAME} cannot be read: {error}"]
    try:
        manifest = json.loads(text)
        body = {key: value for key, value in manifest.items() if key != "crc32"}
        if manifest["crc32"] != _of(body):
            return [f"{NAME} is not as it was written"]
        size_of, block = {name: facts["bytes"] for name, facts in manifest["files"].items()}, manifest["block_bytes"]
        sums = {name: facts["crc32"] for name, facts in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{NAME} is not as it was written"]
    damage, whole = [], []
    for name, size in size_of.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            damage.append(f"{name} is missing")
            continue
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if found != size:
            damage.append(f"{name} has {found:,} bytes, not {size:,}")
        else:
            whole.append(name)
    blocks = [(name, i) for name in whole for i in range(_count(size_of[name], block))][part::parts]
    for (name, i), found in zip(blocks, _checksums(folder, blocks, block), strict=True):
        if isinstance(found, OSError):
            damage.append(f"{name} cannot be read: {found.strerror or found}")
        elif found != sums[name][i]:
            end = min((i + 1) * block, size_of[name])
            damage.append(f"{name} is not as it was written, between the bytes {i * block:,} and {end:,}")
    return damage


def _count(size: int, block: int) -> int:
    return -(-size // block)


def _of(body: dict) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _checksums(folder: pathlib.Path, blocks: list[Block], block: int) -> list[str | OSError]:
    """The checksum of each block, several at a time: reading and zlib let other threads go on. An error stands in its place."""
    def one(place: Block) -> str | OSError:
        name, i = place
        try:
            with open(folder / name, "rb") as handle:
                handle.seek(i * block)
                return f"{zlib.crc32(handle.read(block)):08x}"
        except OSError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, blocks))
