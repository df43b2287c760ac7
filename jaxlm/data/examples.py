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
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Examples:
    """A set of examples, gathered by number.

    Attributes:
      tokens: unsigned ids [targets + length]: the stream, prolonged so that a window can start at every target.
      length: L, tokens per example.
      targets: tokens that are predicted in one pass over the examples.
      bytes: bytes of text that these targets stand for.
    """
    tokens: np.ndarray
    length: int
    targets: int
    bytes: int

    @classmethod
    def ring(cls, tokens: np.ndarray, length: int, bytes: int) -> "Examples":
        """Examples whose targets are all of `tokens` [T], T > length, the first one predicted from the last one."""
        return cls(np.concatenate([tokens, tokens[:length]]), length, len(tokens), bytes)

    @classmethod
    def line(cls, context: int, tokens: np.ndarray, length: int, bytes: int) -> "Examples":
        """Examples whose targets are all of `tokens` [T], the first one predicted from the id `context`."""
        parts = [np.array([context], tokens.dtype), tokens, np.zeros(length - 1, tokens.dtype)]
        return cls(np.concatenate(parts), length, len(tokens), bytes)

    def __len__(self) -> int:
        return -(-self.targets // self.length)

    @property
    def bytes_per_target(self) -> float:
        """What turns a loss per target into bits per byte."""
        return self.bytes / self.targets

    @functools.cached_property
    def _windows(self) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(self.tokens, self.length + 1)

    def gather(self, indices: np.ndarray, shift: int | np.ndarray = 0) -> dict[str, np.ndarray]:
        """The examples `indices`, int64 [n]; an index past the end gives an example without targets.

        Args:
          shift: tokens by which the borders are moved on, in [0, targets): a number or int64 [n]; 0 for a line.

        Returns:
          inputs int32 [n, L], targets int32 [n, L], mask bool [n, L].
        """
        begin = np.asarray(indices, np.int64) * self.length
        windows = self._windows[(begin + shift) % self.targets]
        return {"inputs": windows[:, :-1].astype(np.int32), "targets": windows[:, 1:].astype(np.int32),
                "mask": begin[:, None] + np.arange(self.length) < self.targets}

    def example(self, index: int) -> dict[str, np.ndarray]:
        """One example, without shift: inputs, targets int32 [L], mask bool [L]."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return {name: array[0] for name, array in self.gather(np.array([index])).items()}
