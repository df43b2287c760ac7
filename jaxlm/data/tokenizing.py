"""A corpus into a token cache: in parts, several at a time, each of them durable when it is done.

The corpus is cut into parts (stretches of a .jsonl file, whole files otherwise) that do not depend on the number of workers; a
worker writes a part's arrays beside the others, then its counts, and renames those into place. What was killed finds the parts
that are done and makes the others. In the end the parts are put one after the other, and the manifest is written last.
"""

import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxlm.config import DataConfig, to_dict
from jaxlm.data.encoder import Encoder, make_encoder
from jaxlm.data.files import CACHE, File, find_files
from jaxlm.data.sources import Counts, documents_of
from jaxlm.data.token_cache import ARRAYS, FORMAT, checksums, crc_of, read_manifest
from jaxlm.errors import RunError
from jaxlm.run_directory import make_folder
from partitioning.declaration import DeclarationError

PARTS, SMALLEST, LARGEST = 256, 1 << 18, 64 << 20  # of all text, and the bytes of a .jsonl file in one
THREADS = 8  # more workers than that would wait for each other in one process
GROUP = 2 << 20  # bytes of text that are encoded together
PATIENCE = 3  # seconds that another process may go on writing in the folder
_encoder: Encoder | None = None  # what this process encodes with
_stopped = threading.Event()  # parts that are being made are given up


def make_cache(config: DataConfig, out: pathlib.Path, *, workers: int, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Tokenizes config.train into the cache `out`, going on where an earlier call was stopped.

    Args:
      workers: threads or processes.
      progress: told (bytes of the sources that are done, bytes of all).

    Returns:
      The manifest.

    Raises:
      DeclarationError: the text or the tokenizer cannot be used, or `out` holds something else.
    """
    if config.content == "preference":
        raise DeclarationError("config.data.content = 'preference' gives pairs; a token cache holds 'text' or 'chat'.")
    encoder = make_encoder(config)
    plan = _plan(config, encoder)
    if (out / CACHE).exists():
        manifest = read_manifest(out)
        if manifest["skipped"] and config.on_bad_record == "fail":
            raise DeclarationError(
                f"{out} was made with {manifest['skipped']:,} bad records skipped, and config.data.on_bad_record = 'fail' takes "
                "none; mend them and give another --out, or set it to 'skip'."
            )
        if manifest["plan_crc32"] == crc_of(plan):
            _tidy(out)
            return manifest
        raise DeclarationError(
            f"{out} holds a token cache of other text, another tokenizer or other options; give another --out."
        )
    with _start(out, plan):
        if (out / CACHE).exists():  # another process has just finished it
            return read_manifest(out)
        return _make(config, encoder, plan, out, workers, progress)


def _make(
    config: DataConfig, encoder: Encoder, plan: dict[str, Any], out: pathlib.Path, workers: int, progress: Callable
) -> dict[str, Any]:
    """The parts that are not there yet, then the whole."""
    units = plan["units"]
    done = {i: facts for i in range(len(units)) if (facts := _facts(out, i)) is not None}
    if config.on_bad_record == "fail":
        done = {i: facts for i, facts in done.items() if not facts["skipped"]}  # those are made again, and say what is wrong
    total, ready = sum(u["bytes"] for u in units), sum(units[i]["bytes"] for i in done)
    progress(ready, total)
    for i, facts in _parts_made(config, encoder, out, [(i, unit) for i, unit in enumerate(units) if i not in done], workers):
        done[i] = facts
        ready += units[i]["bytes"]
        progress(ready, total)
    return _finish(out, plan, [done[i] for i in range(len(units))], encoder, config)


def _parts_made(
    config: DataConfig, encoder: Encoder, out: pathlib.Path, waiting: list[tuple[int, dict[str, Any]]], workers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Makes parts, by as many processes as there are workers, and gives the number and the counts of each as it is done."""
    global _encoder
    _encoder = encoder  # processes that are started make their own
    if len(waiting) < 2:  # the tokenizer's library uses all cores by itself
        for i, unit in waiting:
            yield i, _make_part(str(out), i, unit, config.on_bad_record)
        return
    with _one_thread_each(), _pool(config, encoder, min(workers, len(waiting))) as pool:
        running = {pool.submit(_make_part, str(out), i, unit, config.on_bad_record): i for i, unit in waiting}
        try:
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise RunError(
                "a worker was killed, most often for want of memory; run the same command again, with fewer --workers."
            ) from None
        except BaseException:
            _stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """The workers are the parallelism; the tokenizer's library has none of its own in here."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    _stopped.clear()
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ |= {} if before is None else {name: before}


def _pool(config: DataConfig, encoder: Encoder, workers: int) -> concurrent.futures.Executor:
    """Threads share the tokenizer's tables, and with them the cores' caches: a third faster than as many processes. But
    conversations are rendered in Python, one at a time in a process, and what is done between texts is Python too."""
    if workers == 1 or encoder.template is None and workers <= THREADS:
        return concurrent.futures.ThreadPoolExecutor(workers)
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, context, _begin, (config, os.getpid()))


def _plan(config: DataConfig, encoder: Encoder) -> dict[str, Any]:
    """What is to be done, in plain values: equal plans make equal caches."""
    files = find_files(config.train, "config.data.train")
    tokens = [file.name for file in files if file.holds_tokens]
    if tokens:
        raise DeclarationError(f"config.data.train: {tokens[0]} holds tokens already; name files of text.")
    sources, units = [], []
    sizes = [file.size() for file in files]
    step = min(max(sum(sizes) // PARTS, SMALLEST), LARGEST)
    for file, size in zip(files, sizes):
        changed = 0 if file.remote or file.path.is_dir() else file.path.stat().st_mtime_ns
        sources.append({"file": file.name, "bytes": size, "changed": changed})
        cut = file.kind == ".jsonl" and not file.compression and not file.remote
        for begin in range(0, max(size, 1), step if cut else max(size, 1)):
            end = min(begin + step, size) if cut else size
            units.append({"source": len(sources) - 1, "bytes": end - begin, "part": [begin, end] if cut else None})
    return {
        "sources": sources,
        "units": units,
        "tokenizer": encoder.tokenizer.sha256,
        "options": encoder.options,
    }


@contextlib.contextmanager
def _start(out: pathlib.Path, plan: dict[str, Any]) -> Iterator[None]:
    """Makes the folder, or finds that it has been begun in the same way. Nobody else writes there while this is entered."""
    path = out / "plan.json"
    if path.exists():
        if json.loads(path.read_text("utf-8")) != json.loads(json.dumps(plan)):
            raise DeclarationError(
                f"{out} holds the beginning of a token cache of other text (the sources may have changed since), "
                "another tokenizer or other options; remove it, or give another --out."
            )
    else:
        if out.exists() and (not out.is_dir() or any(p.name != "plan.json.draft" for p in out.iterdir())):
            raise DeclarationError(f"--out={out} is there and holds no token cache; give a folder that is empty or new.")
        make_folder(out, "--out")
        _write(path, json.dumps(plan, indent=1))
    with open(path, "rb") as handle:
        for attempt in range(PATIENCE * 10 + 1):  # the workers of a run that was killed hold it for half a second more
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == PATIENCE * 10:
                    raise DeclarationError(f"another process is making {out}; wait for its end, or give another --out.") from None
                time.sleep(0.1)
            except OSError:
                break  # a file system without locks
        if path.exists():
            (out / "parts").mkdir(exist_ok=True)
        yield


def _write(path: pathlib.Path, text: str) -> None:
    """Writes a file so that it is there whole, and durably, or not at all."""
    draft = path.with_name(path.name + ".draft")
    with open(draft, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(draft, path)


def _facts(out: pathlib.Path, i: int) -> dict[str, Any] | None:
    path = out / "parts" / f"{i:06d}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _begin(config: DataConfig, parent: int) -> None:
    """A worker's first act. It ends when the process that started it does, however that ends."""
    global _encoder
    _encoder = make_encoder(config)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_part(out: str, i: int, unit: dict[str, Any], on_bad_record: str) -> dict[str, Any]:
    """Writes part `i` and returns its counts."""
    stem, encoder = pathlib.Path(out) / "parts" / f"{i:06d}", _encoder
    plan = json.loads((pathlib.Path(out) / "plan.json").read_text("utf-8"))
    file = File(plan["sources"][unit["source"]]["file"])
    names = [name for name in ARRAYS if name != "loss.bin" or encoder.template is not None]
    counts, totals = Counts(), collections.Counter(tokens=0, bytes=0, documents=0)
    handles = {name: open(f"{stem}.{name}", "wb") for name in names}
    documents = documents_of(file, encoder.extract, on_bad_record, counts, tuple(unit["part"]) if unit["part"] else None)
    for some in groups(documents):
        if _stopped.is_set():
            raise RunError("stopped.")
        encoded = encoder.encode(some)
        arrays = {
            "tokens.bin": encoded.tokens,
            "ends.bin": encoded.ends + totals["tokens"],
            "byte_ends.bin": encoded.byte_ends + totals["bytes"],
            "loss.bin": encoded.loss,
        }
        for name, handle in handles.items():
            array = arrays[name]
            handle.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
        counts.skipped += encoded.skipped
        size = int(encoded.byte_ends[-1]) if len(encoded.ends) else 0
        totals.update(tokens=len(encoded.tokens), bytes=size, documents=len(encoded.ends))
    for handle in handles.values():
        handle.flush()
        os.fsync(handle.fileno())
        handle.close()
    facts = {**totals, "skipped": counts.skipped, "blank": counts.blank}
    if not unit["part"] or unit["part"][0] == 0:
        facts["sha256"] = _sha256(file)
    _write(pathlib.Path(f"{stem}.json"), json.dumps(facts))
    return facts


def groups(documents: Iterator[bytes], size: int = GROUP) -> Iterator[list[bytes]]:
    """Runs of documents of about `size` bytes."""
    some, held = [], 0
    for document in documents:
        some.append(document)
        held += len(document)
        if held >= size:
            yield some
            some, held = [], 0
    if some:
        yield some


def _sha256(file: File) -> str:
    """Of a file as it is stored; of a folder, of its files' names and contents in the order of their names."""
    digest = hashlib.sha256()
    folder = file.kind == "dataset"
    for part in [File(str(path)) for path in sorted(file.path.rglob("*")) if path.is_file()] if folder else [file]:
        if folder:
            digest.update(os.path.relpath(part.name, file.name).encode() + b"\n")
        with part.open_stored() as handle:
            while piece := handle.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def _finish(out: pathlib.Path, plan: dict[str, Any], facts: list[dict[str, Any]], encoder: Encoder, config: DataConfig) -> dict:
    """Puts the parts one after the other and writes the manifest."""
    totals = {name: sum(f[name] for f in facts) for name in ("documents", "tokens", "bytes", "skipped", "blank")}
    if not totals["documents"]:
        raise DeclarationError(
            f"config.data.train = {config.train!r} has no text ({totals['skipped']} bad records skipped); name "
            f"files that have some, and remove {out}."
        )
    alone = totals["documents"] == 1 and encoder.eos is not None and encoder.template is None
    dtype = encoder.tokenizer.dtype
    names = [name for name in ARRAYS if name != "loss.bin" or encoder.template is not None]
    for name in names:
        before = 0
        with open(out / name, "wb") as whole:
            for i, part in enumerate(facts):
                piece = out / "parts" / f"{i:06d}.{name}"
                if name in ("ends.bin", "byte_ends.bin"):
                    array = np.fromfile(piece, "<i8") + before
                    before += part["tokens" if name == "ends.bin" else "bytes"]
                    whole.write((array - 1 if alone and name == "ends.bin" else array).tobytes())
                else:
                    with open(piece, "rb") as handle:
                        shutil.copyfileobj(handle, whole, 1 << 22)
            if alone and name == "tokens.bin":  # a corpus of one document has nothing that an end token would stand between
                whole.truncate((totals["tokens"] - 1) * dtype.itemsize)
            whole.flush()
            os.fsync(whole.fileno())
    totals["tokens"] -= alone
    sources = [dict(source) for source in plan["sources"]]
    for unit, part in zip(plan["units"], facts):
        source = sources[unit["source"]]
        source.pop("changed", None)
        source |= {name: source.get(name, 0) + part[name] for name in ("documents", "tokens", "skipped", "blank")}
        source["sha256"] = part.get("sha256", source.get("sha256"))
    tokenizer = encoder.tokenizer
    manifest = {
        "format": FORMAT,
        "dtype": dtype.name,
        **totals,
        "sources": sources,
        "tokenizer": {
            "name": tokenizer.name,
            "kind": tokenizer.kind,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
        },
        "options": plan["options"],
        "made_by": {k: v for k, v in to_dict(config).items() if k in ("train", "tokenizer")},
        "plan_crc32": crc_of(plan),
        "files": {name: checksums(out / name) for name in names},
    }
    manifest = json.loads(json.dumps(manifest))
    _write(out / CACHE, json.dumps({**manifest, "crc32": crc_of(manifest)}, indent=1) + "\n")
    _tidy(out)
    return read_manifest(out)


def _tidy(out: pathlib.Path) -> None:
    """Removes what a finished cache no longer needs."""
    shutil.rmtree(out / "parts", ignore_errors=True)
    (out / "plan.json").unlink(missing_ok=True)


def train_bpe(config: DataConfig, vocab_size: int, out: pathlib.Path) -> int:
    """Trains a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909, on bytes as in GPT-2) on config.train.

    Its only special token is <|endoftext|>. Text is split into words as cl100k_base does it.

    Args:
      vocab_size: ids, at least the 256 bytes and the special token.
      out: the folder that gets the tokenizer.json.

    Returns:
      The number of ids, which is smaller where the corpus is.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from jaxlm.data.sources import text_extract
    from jaxlm.data.tokenizer_files import RANKS

    if vocab_size < 257:
        raise DeclarationError(f"--vocab_size={vocab_size}; expected at least 257: the bytes and the end token.")
    if config.content != "text":
        raise DeclarationError("--train reads config.data.content = 'text'; config.data.text_field names the field it is in.")
    files, counts = find_files(config.train, "config.data.train"), Counts()
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(RANKS["cl100k_base"][0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        show_progress=sys.stderr.isatty(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (
        document.decode("utf-8")
        for file in files
        for document in documents_of(file, text_extract(config.text_field), config.on_bad_record, counts)
    )
    first = next(texts, None)
    if first is None:
        raise DeclarationError(
            f"config.data.train = {config.train!r} has no text ({counts.skipped} bad records skipped); name files that have some."
        )
    if out.is_dir() and any(out.iterdir()):
        raise DeclarationError(f"--out={out} is there and holds something; give a folder that is empty or new.")
    make_folder(out, "--out")
    model.train_from_iterator(itertools.chain([first], texts), trainer)
    model.save(str(out / "tokenizer.json"))
    return model.get_vocab_size()
