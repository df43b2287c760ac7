"""`python -m jaxlm.tokenize --out=DIR`: a corpus into a token cache, or (`--train`) a tokenizer from a corpus."""

import argparse
import json
import os
import pathlib
import sys
import time

from jaxlm import commandline
from jaxlm.config import Config
from partitioning.declaration import DeclarationError


def main(flags: argparse.Namespace) -> int:
    from jaxlm.data import token_cache, tokenizing

    if flags.out is None:
        raise DeclarationError("where to? Pass --out=DIR, a folder that is new or holds the beginning of the same cache.")
    out = pathlib.Path(flags.out)
    if flags.check:
        found = token_cache.damage(out, token_cache.read_manifest(out), whole=True)
        if found:
            raise DeclarationError(
                f"{out} is not as its manifest says: {'; '.join(found)}. Make the cache anew, or copy it again."
            )
        print(f"{out}: every byte is as it was written")
        return 0
    data = commandline.load_config(flags.config, flags.overrides).data
    if any(not isinstance(name, str) for name in data.train):
        raise DeclarationError("config.data.train declares a mixture; make a cache of each of its sources, and mix those.")
    if flags.train:
        count = tokenizing.train_bpe(data, flags.vocab_size, out)
        short = f" (of {flags.vocab_size:,}: the text gives no more)" if count < flags.vocab_size else ""
        print(f"{out / 'tokenizer.json'}: {count:,} ids{short}; use it with --config.data.tokenizer={out}")
        return 0
    if flags.workers < 1:
        raise DeclarationError(f"--workers={flags.workers}; expected at least 1.")
    begun = time.perf_counter()
    with Progress() as progress:
        manifest = tokenizing.make_cache(data, out, workers=flags.workers, progress=progress)
    facts = {
        "cache": str(out),
        "seconds": round(time.perf_counter() - begun, 2),
        **{name: manifest[name] for name in ("documents", "tokens", "bytes", "skipped", "blank", "dtype")},
    }
    if flags.json:
        print(json.dumps(facts))
        return 0
    print(
        f"{out}: {facts['documents']:,} documents, {facts['bytes']:,} bytes = {facts['tokens']:,} tokens ({facts['dtype']}), "
        f"in {facts['seconds']:.1f} s"
    )
    for name, words in (("skipped", "bad records were skipped"), ("blank", "documents without text were left out")):
        if facts[name]:
            print(f"{facts[name]:,} {words}")
    print(
        f"train on it with --config.data.train={out}"
        + (f" --config.data.content={data.content}" if data.content != Config().data.content else "")
        + (f" --config.data.tokenizer={data.tokenizer}" if data.tokenizer != Config().data.tokenizer else "")
    )
    return 0


class Progress:
    """A bar on a terminal; else a line now and then. Called with the bytes that are done and the bytes of all."""

    def __init__(self):
        self._bar, self._said = None, time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = self._bar or tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            print(f"{done:,} of {total:,} bytes", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()


def arguments() -> argparse.ArgumentParser:
    out = commandline.parser(
        "jaxlm.tokenize",
        "Makes a token cache of config.data.train, in parallel; the same command goes on after a "
        "kill. --config.data.tokenizer, bos, eos, content, text_field and on_bad_record hold.",
    )
    out.add_argument("--out", metavar="DIR", help="the cache's folder, or the tokenizer's")
    workers = "threads or processes (default: one per core)"
    out.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help=workers)
    out.add_argument("--train", action="store_true", help="train a byte-level BPE on the corpus instead")
    out.add_argument("--vocab_size", type=int, default=8192, metavar="N", help="with --train: ids")
    out.add_argument("--check", action="store_true", help="compare every byte of the cache with its manifest instead")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


if __name__ == "__main__":
    sys.exit(commandline.run(main, arguments()))
