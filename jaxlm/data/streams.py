"""A stream: the tokens of many documents, one after the other, in memory or memory-mapped from files.

Nothing here copies a stream: it is its parts (arrays, most often maps of files, of which only what is read takes memory) and,
where they are known, the places at which documents end.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from partitioning.declaration import DeclarationError

SCANNED = 1 << 24  # tokens that are looked at together


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Attributes:
    parts: unsigned ids [T_i]; the stream is one after the other.
    ends: int64 [D]: the place behind each document's last token, the last of them the stream's length. None: not known.
    byte_ends: int64 [D]: the bytes of text up to there. None: not known.
    loss: uint8 [T_i], beside the parts: whether a token is ever a target. None: all are.
    fingerprint: what tells this stream from others.
    limit: ids are below it; checked while they are read, where they come from a file whose ids nobody has counted. None: known
      to be so.
    """

    parts: tuple[np.ndarray, ...]
    ends: np.ndarray | None = None
    byte_ends: np.ndarray | None = None
    loss: tuple[np.ndarray, ...] | None = None
    fingerprint: str = ""
    limit: int | None = None

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each part begins, and the length of all."""
        return [0, *itertools.accumulate(len(part) for part in self.parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def bytes(self) -> int | None:
        return None if self.byte_ends is None else int(self.byte_ends[-1]) if len(self.byte_ends) else 0

    @property
    def documents(self) -> int | None:
        return None if self.ends is None else len(self.ends)

    @functools.cached_property
    def targets(self) -> int:
        """Tokens that may be targets."""
        if self.loss is None:
            return len(self)
        return sum(int(np.count_nonzero(part[i : i + SCANNED])) for part in self.loss for i in range(0, len(part), SCANNED))

    def read(self, begin: int, end: int) -> np.ndarray:
        """The ids [begin, end): a view where they lie in one part."""
        return self._read(self.parts, begin, end)

    def read_loss(self, begin: int, end: int) -> np.ndarray:
        """uint8, whether each of [begin, end) may be a target; needs `loss`."""
        return self._read(self.loss, begin, end)

    def _read(self, parts, begin, end):
        if len(parts) == 1:
            return parts[0][begin:end]
        i = bisect.bisect_right(self.starts, begin) - 1
        pieces = []
        while begin < end:
            start, stop = self.starts[i], self.starts[i + 1]
            pieces.append(parts[i][begin - start : min(end, stop) - start])
            begin, i = min(end, stop), i + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else parts[0][:0]

    def at(self, places: np.ndarray) -> np.ndarray:
        """The ids at `places`, int64 [n]."""
        return self._at(self.parts, places)

    def loss_at(self, places: np.ndarray) -> np.ndarray:
        """uint8 [n]; needs `loss`."""
        return self._at(self.loss, places)

    def _at(self, parts, places):
        if len(parts) == 1:
            return parts[0][places]
        which = np.searchsorted(np.asarray(self.starts), places, side="right") - 1
        out = np.empty(len(places), np.result_type(*parts))
        for i in np.unique(which):
            chosen = which == i
            out[chosen] = parts[i][places[chosen] - self.starts[i]]
        return out

    def check(self, ids: np.ndarray) -> None:
        """Raises DeclarationError where ids that were read are none of the model's."""
        if self.limit is None or not ids.size:
            return
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        if not 0 <= wrong < self.limit:
            raise DeclarationError(
                f"the token files hold the id {wrong}, but config.model.vocab_size = {self.limit}: they are of another "
                "tokenizer, or of another width than config.data.token_dtype says (uint16 or uint32)."
            )

    def cut(self, begin: int, end: int, byte_begin: int | None = None, byte_end: int | None = None) -> "Stream":
        """The stream of [begin, end); `byte_begin` and `byte_end` are the bytes of text before those places, if known."""

        def clip(parts):
            spans = [(max(begin - s, 0), min(end, s + len(p)) - s, p) for s, p in zip(self.starts, parts)]
            return tuple(p[a:b] for a, b, p in spans if a < b) or (parts[0][:0],)

        ends = byte_ends = None
        if self.ends is not None:
            first, last = np.searchsorted(self.ends, (begin, end), side="right")
            last = min(int(np.searchsorted(self.ends, end, side="left")), len(self.ends) - 1)
            ends = np.append(self.ends[first:last] - begin, end - begin) if end > begin else self.ends[:0]
            if self.byte_ends is not None and byte_begin is not None and byte_end is not None:
                byte_ends = (
                    np.append(self.byte_ends[first:last] - byte_begin, byte_end - byte_begin)
                    if end > begin
                    else self.byte_ends[:0]
                )
        return Stream(
            clip(self.parts),
            ends,
            byte_ends,
            None if self.loss is None else clip(self.loss),
            f"{self.fingerprint}[{begin}:{end}]",
            self.limit,
        )


def joined(streams: Sequence[Stream]) -> Stream:
    """One stream after the other."""
    if len(streams) == 1:
        return streams[0]

    def shifted(arrays, sizes):
        if any(array is None for array in arrays) or any(size is None for size in sizes):
            return None
        return np.concatenate([array + before for array, before in zip(arrays, itertools.accumulate([0, *sizes]))])

    ends = shifted([s.ends for s in streams], [len(s) for s in streams])
    byte_ends = shifted([s.byte_ends for s in streams], [s.bytes for s in streams])
    loss = None
    if any(s.loss is not None for s in streams):
        loss = tuple(p for s in streams for p in (s.loss or [np.ones(len(part), np.uint8) for part in s.parts]))
    limits = [s.limit for s in streams if s.limit is not None]
    return Stream(
        tuple(part for s in streams for part in s.parts),
        ends,
        byte_ends,
        loss,
        " ".join(s.fingerprint for s in streams),
        min(limits) if limits else None,
    )


def with_documents(stream: Stream, eos_id: int | None) -> Stream:
    """The stream with its documents known: where they are not, they end behind each `eos_id` (found in one pass over it)."""
    if stream.ends is not None:
        return stream
    found = []
    for part, start in zip(stream.parts, stream.starts):
        for i in range(0, len(part) if eos_id is not None else 0, SCANNED):
            found.append(np.flatnonzero(part[i : i + SCANNED] == eos_id) + (start + i + 1))
    ends = np.concatenate([np.zeros(0, np.int64), *found]).astype(np.int64)
    if len(stream) and (not len(ends) or ends[-1] != len(stream)):
        ends = np.append(ends, len(stream))
    return dataclasses.replace(stream, ends=ends)
