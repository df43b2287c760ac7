"""How fast data comes, against the plainest thing that does the same, side by side in one run.

    python scripts/bench_data.py                 batches from a token cache; memory at 10 MB and 1 GB; tokenizing
    python scripts/bench_data.py --only=tokenize --tokenizer=FILE --text=FILE

Each figure is the median of rounds in which both programs run in turn.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from jaxlm.data.examples import Examples
from jaxlm.data.mixture import alone
from jaxlm.data.packing import pack
from jaxlm.data.streams import Stream
from jaxlm.data.token_files import mapped

LENGTH, ROWS, ROUNDS = 2048, 32, 5
SEED = 0


def tokens_per_second(batches, count: int) -> float:
    """Of `count` batches, after some to begin with."""
    for _ in range(20):
        next(batches)
    begun = time.perf_counter()
    total = sum(next(batches)["inputs"].size for _ in range(count))
    return total / (time.perf_counter() - begun)


def plain_grain(tokens: np.ndarray, threads: int):
    """What anybody writes first: windows of a map of the file, shuffled and batched by Grain."""
    import grain

    class Windows:
        def __len__(self):
            return (len(tokens) - 1) // LENGTH

        def __getitem__(self, i):
            window = tokens[i * LENGTH : i * LENGTH + LENGTH + 1].astype(np.int32)
            return {"inputs": window[:-1], "targets": window[1:], "mask": np.ones(LENGTH, bool)}

    source = grain.MapDataset.source(Windows()).shuffle(seed=SEED).repeat().batch(ROWS)
    return iter(source.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16)))


def ours(examples, workers: int):
    from jaxlm.data import train_batches

    return train_batches(alone(examples, ROWS, SEED), prefetch=16, workers=workers)


def make_tokens(folder: pathlib.Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A file of `size` bytes of uint16 ids, documents of log-normal lengths (median 400), their ends."""
    rng = np.random.default_rng(SEED)
    path = folder / f"{size}.bin"
    with open(path, "wb") as handle:
        for _ in range(0, size, 20_000_000):
            handle.write(rng.integers(0, 50_000, min(size, 20_000_000) // 2).astype(np.uint16).tobytes())
    tokens = mapped(path, np.uint16)
    ends = np.cumsum(np.exp(rng.normal(6, 1.0, len(tokens) // 300)).astype(np.int64) + 1)
    ends = ends[ends < len(tokens)]
    return tokens, np.append(ends, len(tokens))


def bench_batches(folder: pathlib.Path) -> None:
    tokens, ends = make_tokens(folder, 400_000_000)
    split = Examples.ring(Stream((tokens,)), LENGTH, None)
    begun = time.perf_counter()
    packed = pack(Stream((tokens,), ends), LENGTH, None, 0, SEED)
    print(f"best fit: {len(ends):,} documents packed in {time.perf_counter() - begun:.2f} s, padding {packed.padding:.3%}")
    for workers in (1, 2):
        rates: dict[str, list[float]] = {"plain Grain": [], "split": [], "best fit": []}
        for _ in range(ROUNDS):
            for name, make in (
                ("plain Grain", lambda: plain_grain(tokens, workers)),
                ("split", lambda: ours(split, workers)),
                ("best fit", lambda: ours(packed, workers)),
            ):
                batches = make()
                rates[name].append(tokens_per_second(batches, 600))
                batches.close()
        plain = statistics.median(rates["plain Grain"])
        for name, found in rates.items():
            middle = statistics.median(found)
            print(f"{workers} thread(s), {name}: {middle / 1e6:.1f} M tokens/s, {middle / plain:.2f} of plain Grain's")


MEMORY = """
import json, sys
import numpy as np
from scripts import bench_data as bench
from jaxlm.data.token_files import mapped
def held():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith(("RssAnon", "VmHWM")))
    return int(fields["RssAnon"].split()[0]) / 1024
tokens = mapped(bench.pathlib.Path(sys.argv[1]), np.uint16)
before = held()
batches = bench.ours(bench.Examples.ring(bench.Stream((tokens,)), bench.LENGTH, None), 1)
for _ in range(int(sys.argv[2])): next(batches)
print(json.dumps([before, held()]))
"""


def bench_memory(folder: pathlib.Path) -> None:
    for size in (10_000_000, 1_000_000_000):
        make_tokens(folder, size)
        steps = max(200, size // 2 // (LENGTH * ROWS))  # the large one once through
        command = [sys.executable, "-c", MEMORY, str(folder / f"{size}.bin"), str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        before, after = json.loads(done.stdout)
        print(f"memory, {size // 10**6:,} MB of tokens, {steps:,} batches: {after - before:.1f} MiB more than before (anonymous)")
        (folder / f"{size}.bin").unlink()


def bench_tokenize(folder: pathlib.Path, tokenizer: str, text: str) -> None:
    from jaxlm.data import load_tokenizer

    whole = pathlib.Path(text).read_text("utf-8")
    documents = [whole[i : i + 4000] for i in range(0, len(whole), 4000)] * 4
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), "utf-8")
    size = sum(len(document.encode()) for document in documents)
    model = load_tokenizer(tokenizer).model
    rates: dict[str, list[float]] = {"the library": [], "jaxlm.tokenize": []}
    for i in range(2 * ROUNDS):
        begun = time.perf_counter()
        for start in range(0, len(documents), 1000):
            model.encode_batch_fast(documents[start : start + 1000], add_special_tokens=False)
        rates["the library"].append(size / (time.perf_counter() - begun))
        config = [f"--config.data.train={corpus}", f"--config.data.tokenizer={tokenizer}", f"--out={folder / f'cache{i}'}"]
        done = subprocess.run(
            [sys.executable, "-m", "jaxlm.tokenize", *config, "--json"], capture_output=True, text=True, check=True
        )
        rates["jaxlm.tokenize"].append(size / json.loads(done.stdout)["seconds"])
    ratios = [ours / library for library, ours in zip(*rates.values())]
    for name, found in rates.items():
        print(f"{name}: median {statistics.median(found) / 1e6:.2f}, best {max(found) / 1e6:.2f} MB/s of text")
    print(f"ours to the library's, round by round: median {statistics.median(ratios):.2f}; of the bests "
          f"{max(rates['jaxlm.tokenize']) / max(rates['the library']):.2f}")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", choices=("batches", "memory", "tokenize"))
    flags.add_argument("--tokenizer", help="a tokenizer.json to measure with")
    flags.add_argument("--text", help="a text file to tokenize")
    flags = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if flags.only in (None, "batches"):
            bench_batches(folder)
        if flags.only in (None, "memory"):
            bench_memory(folder)
        if flags.only in (None, "tokenize") and flags.tokenizer and flags.text:
            bench_tokenize(folder, flags.tokenizer, flags.text)


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
    main()
