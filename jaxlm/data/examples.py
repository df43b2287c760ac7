"""Examples of a fixed length, cut from one stream of tokens.

Concatenate and split: example i has the inputs t[iL : iL+L] and the targets t[iL+1 : iL+L+1]. Every token is a target exactly
once; the last example is shorter than L when L does not divide the number of targets, and its mask says so (never a token value).

Training text is a ring, evaluation text a line:

- In a **ring** the token after the last one is the first one. The borders between examples can then start anywhere, `shift`, and
  each epoch of training starts elsewhere, so that no token has to sit behind the same border in every epoch. The price is one
  border per epoch where the end of the text is the context of its beginning.
- A **line** starts with a context token that is not itself a target, so that the first token can be scored too.
"""

import dataclasses

import numpy as np

from jaxlm.data.streams import Stream


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """A set of examples, gathered by number.

    Attributes:
      stream: the tokens.
      length: L, tokens per example.
      bytes: bytes of text that the targets stand for; None when that is not known.
      context: the id before the first token of a line; None for a ring.
    """
    stream: Stream
    length: int
    bytes: int | None
    context: int | None = None

    arrays = ("inputs", "targets", "mask")

    @classmethod
    def ring(cls, tokens: np.ndarray | Stream, length: int, bytes: int | None) -> "Examples":
        """Examples whose targets are all of `tokens` [T], T > length, the first one predicted from the last one."""
        return cls(_stream(tokens), length, bytes)

    @classmethod
    def line(cls, context: int, tokens: np.ndarray | Stream, length: int, bytes: int | None) -> "Examples":
        """Examples whose targets are all of `tokens` [T], the first one predicted from the id `context`."""
        return cls(_stream(tokens), length, bytes, context)

    def __len__(self) -> int:
        return -(-len(self.stream) // self.length)

    @property
    def targets(self) -> int:
        """Tokens that are predicted in one pass over the examples."""
        return self.stream.targets

    @property
    def shifts(self) -> int:
        """How many places the borders can begin at."""
        return len(self.stream) if self.context is None else 1

    @property
    def padding(self) -> float:
        """The share of the examples' places that hold no token."""
        return 1 - len(self.stream) / (len(self) * self.length)

    @property
    def bytes_per_target(self) -> float | None:
        """What turns a loss per target into bits per byte."""
        return None if self.bytes is None else self.bytes / max(self.targets, 1)

    def gather(self, indices: np.ndarray, shift: int | np.ndarray = 0) -> dict[str, np.ndarray]:
        """The examples `indices`, int64 [n]; an index past the end gives an example without targets.

        Args:
          shift: tokens by which the borders are moved on, in [0, shifts): a number or int64 [n]; 0 for a line.

        Returns:
          inputs int32 [n, L], targets int32 [n, L], mask bool [n, L].
        """
        size, L = len(self.stream), self.length
        begin = np.asarray(indices, np.int64) * L
        shape = (len(begin), L)
        inputs, targets = np.empty(shape, np.int32), np.empty(shape, np.int32)
        mask = np.empty(shape, bool)
        places = (begin + shift) % size if self.context is None else np.minimum(begin, size)
        for r, (place, left) in enumerate(zip(places.tolist(), (size - begin).tolist())):
            ids = self._window(place)
            inputs[r], targets[r] = ids[:-1], ids[1:]
            mask[r] = True
            if left < L:
                mask[r, max(left, 0):] = False
            if self.stream.loss is not None:
                mask[r] &= self._loss(place)
        self.stream.check(inputs)
        self.stream.check(targets[:, -1])
        return {"inputs": inputs, "targets": targets, "mask": mask}

    def _window(self, place: int) -> np.ndarray:
        """The L + 1 ids from `place` on, of a ring, or of the context and a line and zeros."""
        size, end = len(self.stream), place + self.length + 1
        read = self.stream.read
        if self.context is None:
            return read(place, end) if end <= size else np.concatenate([read(place, size), read(0, end - size)])
        ids = read(max(place - 1, 0), min(end - 1, size))
        before = [self.context] if place == 0 else []
        return np.concatenate([before, ids, np.zeros(self.length + 1 - len(before) - len(ids))]).astype(np.int64) \
            if len(ids) < self.length + 1 else ids

    def _loss(self, place: int) -> np.ndarray:
        """Which of the targets of a window count."""
        size, read = len(self.stream), self.stream.read_loss
        if self.context is None:
            first, end = (place + 1) % size, (place + 1) % size + self.length
            found = read(first, end) if end <= size else np.concatenate([read(first, size), read(0, end - size)])
        else:
            found = read(place, min(place + self.length, size))
            found = np.concatenate([found, np.zeros(self.length - len(found), np.uint8)])
        return found.astype(bool)

    def example(self, index: int) -> dict[str, np.ndarray]:
        """One example, without shift: inputs, targets int32 [L], mask bool [L]."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return {name: array[0] for name, array in self.gather(np.array([index])).items()}


def _stream(tokens: np.ndarray | Stream) -> Stream:
    return tokens if isinstance(tokens, Stream) else Stream((tokens,))
