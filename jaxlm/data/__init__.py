"""Text or tokens in, batches of token ids out.

`files` finds what the configuration names, `sources` reads documents, `tokenizer` and `chat` make them ids, `encoder` says what
stands around them; `token_cache` and `token_files` are tokens that lie on disk already. `corpus` splits them into training and
evaluation text and cuts both into examples of a fixed length (`examples`: one stream, cut; `packing`: whole documents). `mixture`
says whose turn it is, and `batches` serves the examples in an order that is a pure function of (seed, step), through Grain.
`feed` then puts batches on devices ahead of time.

The seam is `Examples`: whatever can say how many examples it has and gather some of them by number can be trained on, in the
same order and with the same guarantee, whether it lies in memory, in a token cache or in a mixture.
"""

from jaxlm.data.batches import Batches, eval_batches, train_batches
from jaxlm.data.corpus import Data, open_data
from jaxlm.data.examples import Examples
from jaxlm.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Batches", "Data", "Examples", "Tokenizer", "eval_batches", "load_tokenizer", "open_data", "train_batches"]
