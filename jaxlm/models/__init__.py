"""The language model: described in Flax NNX, used as pure functions over nested dicts of arrays."""

from jaxlm.models.language_model import LanguageModel, Sums, build_model
from jaxlm.models.parameters import count_parameters

__all__ = ["LanguageModel", "Sums", "build_model", "count_parameters"]
