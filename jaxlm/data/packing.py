"""Documents packed whole: several in one example, each a segment that sees nothing of the others.

A document longer than an example is cut into pieces of the example's length and a rest. Pieces go, the longest first, each into
the example where it leaves the least room (best-fit decreasing; Ding et al. 2024, "Fewer truncations improve language modeling",
arXiv:2404.10830), in one pass over the lengths that takes all pieces of a length together.

Every token is a target exactly once. The first token of a document is predicted from what stands before documents: its own
beginning token, which is then no target, or else `context`. The first token of a later piece is predicted from its predecessor,
and from nothing else.
"""

import bisect
import dataclasses

import numpy as np

from jaxlm.data.order import key, permute
from jaxlm.data.streams import Stream


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Which bin each piece goes into: int64 [n], bins numbered from 0.

    Args:
      lengths: int [n], each in 1..room. Among equal ones, the earlier goes first.
      room: what a bin holds.
    """
    order = np.argsort(-lengths, kind="stable")
    out = np.empty(len(lengths), np.int64)
    bins = 0
    open_bins: dict[int, list[np.ndarray]] = {}  # room left -> bins, as arrays of their numbers
    rooms: list[int] = []  # its keys, ascending
    values, starts = np.unique(-lengths[order], return_index=True)
    for length, begin, end in zip((-values).tolist(), starts.tolist(), [*starts[1:].tolist(), len(order)]):
        while begin < end:
            i = bisect.bisect_left(rooms, length)
            left = rooms[i] if i < len(rooms) else room
            each = left // length  # a bin that takes one has the least room for the next, too
            wanted = -(-(end - begin) // each)
            if i < len(rooms):
                stack = open_bins[left]
                chosen = stack.pop()
                if len(chosen) > wanted:
                    stack.append(chosen[wanted:])
                    chosen = chosen[:wanted]
                if not stack:
                    del open_bins[left], rooms[i]
            else:
                chosen, bins = np.arange(bins, bins + wanted), bins + wanted
            count = min(end - begin, len(chosen) * each)
            out[order[begin : begin + count]] = np.repeat(chosen, each)[:count]
            begin += count
            full, rest = divmod(count, each)
            for numbers, room_left in ((chosen[:full], left - each * length), (chosen[full:], left - rest * length)):
                if len(numbers) and room_left:
                    if room_left not in open_bins:
                        bisect.insort(rooms, room_left)
                        open_bins[room_left] = []
                    open_bins[room_left].append(numbers)
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class PackedExamples:
    """Examples of whole documents, gathered by number; made by `pack`.

    Attributes:
      stream: the tokens; its documents are known.
      length: L, places of an example.
      bytes: bytes of text that the targets stand for; None when that is not known.
      context: the id before a document's first target.
      begins, lengths: int64, int32 [P]: the pieces (places of the stream that are targets), example by example.
      heads: bool [P]: whether a piece begins a document.
      bounds: int64 [N + 1]: example i holds the pieces bounds[i] to bounds[i + 1].
    """

    stream: Stream
    length: int
    bytes: int | None
    context: int
    begins: np.ndarray
    lengths: np.ndarray
    heads: np.ndarray
    bounds: np.ndarray

    arrays = ("inputs", "targets", "mask", "positions", "segment_ids")
    shifts = 1

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def places(self) -> int:
        """Tokens in one pass over the examples."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def targets(self) -> int:
        """Tokens that are predicted in one pass over the examples."""
        return self.places if self.stream.loss is None else self.stream.targets

    @property
    def padding(self) -> float:
        """The share of the examples' places that hold no token."""
        return 1 - self.places / (len(self) * self.length)

    @property
    def bytes_per_target(self) -> float | None:
        return None if self.bytes is None else self.bytes / max(self.targets, 1)

    def gather(self, indices: np.ndarray, shift: int | np.ndarray = 0) -> dict[str, np.ndarray]:
        """The examples `indices`, int64 [n]; an index past the end gives an example of nothing but padding. `shift` is 0.

        Returns:
          inputs, targets int32 [n, L]; mask bool [n, L]; positions int32 [n, L], from 0 in each segment; segment_ids int32 [n,
          L], from 1 in each row, 0 for padding.
        """
        indices = np.minimum(np.asarray(indices, np.int64), len(self))
        first, last = self.bounds[indices], self.bounds[np.minimum(indices + 1, len(self))]
        counts = last - first
        pieces = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        lengths = self.lengths[pieces].astype(np.int64)
        starts = np.cumsum(lengths) - lengths  # of the pieces, among the tokens of all rows together
        total = int(lengths.sum())
        running = np.arange(total)
        places = running + np.repeat(self.begins[pieces] - starts, lengths)
        targets = self.stream.at(places)
        inputs = np.empty(total, np.int32)
        inputs[1:] = targets[:-1]
        before = self.stream.at(np.maximum(self.begins[pieces] - 1, 0)).astype(np.int64)
        inputs[starts] = np.where(self.heads[pieces], self.context, before)
        flat = {
            "inputs": inputs,
            "targets": targets,
            "mask": np.ones(total, bool) if self.stream.loss is None else self.stream.loss_at(places).astype(bool),
            "positions": running - np.repeat(starts, lengths),
            "segment_ids": np.repeat(np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts) + 1, lengths),
        }
        self.stream.check(targets)
        ends = np.cumsum(np.bincount(np.repeat(np.arange(len(indices)), counts), lengths, len(indices)).astype(np.int64)).tolist()
        out = {name: np.zeros((len(indices), self.length), bool if name == "mask" else np.int32) for name in flat}
        for name, array in flat.items():
            for row, (begin, end) in enumerate(zip([0, *ends], ends)):
                out[name][row, : end - begin] = array[begin:end]
        return out

    def example(self, index: int) -> dict[str, np.ndarray]:
        """One example: the arrays of `gather` without their leading dim."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return {name: array[0] for name, array in self.gather(np.array([index])).items()}


def pack(stream: Stream, length: int, bytes: int | None, context: int, seed: int, *, begun: bool = False) -> PackedExamples:
    """Packs the documents of `stream`, of equal lengths in an order drawn from `seed`.

    Args:
      stream: its documents are known (`with_documents`).
      length: places of an example.
      context: the id before a document's first token.
      begun: whether a document that begins with `context` has it as its own, so that it is no target. Not every one need have it:
        token files have what was put there, and text that is held out may begin inside a document.
    """
    begins = np.concatenate([[0], stream.ends[:-1]]).astype(np.int64)
    if begun:
        full = begins < stream.ends
        begins[full] += stream.at(begins[full]) == context
    sizes = np.maximum(stream.ends - begins, 0)
    pieces = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lengths = np.minimum(sizes[document] - number * length, length).astype(np.int32)
    begins = begins[document] + number * length
    heads = number == 0
    if len(lengths) > 1:
        mixed = permute(np.arange(len(lengths)), len(lengths), np.repeat(key(seed, np.array([0]), "pack"), len(lengths)))
        lengths, begins, heads = lengths[mixed], begins[mixed], heads[mixed]
    bins = best_fit(lengths, length)
    order = np.argsort(bins, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bins))]).astype(np.int64) if len(bins) else np.zeros(1, np.int64)
    return PackedExamples(stream, length, bytes, context, begins[order], lengths[order], heads[order], bounds)
