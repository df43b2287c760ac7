"""Small models of every family with what `transformers` computed for them (`scripts/make_huggingface_fixtures.py`)."""

import functools
import pathlib

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxlm.huggingface.families import Family
from jaxlm.huggingface.tensors import write_from
from jaxlm.huggingface.weights import Weights, sources
from jaxlm.models import LanguageModel, build_model
from kernels.cross_entropy import cross_entropy
from partitioning.paths import flatten

FOLDERS = pathlib.Path(__file__).parents[2] / "data" / "huggingface"
NAMES = sorted(path.name for path in FOLDERS.iterdir())


def read(folder: pathlib.Path) -> tuple[LanguageModel, dict, Family]:
    """The model of a folder, its parameters on one device, and its family."""
    weights = Weights(folder)
    model = build_model(weights.model, remat=("none",))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place), model.specs)
    return model, weights.restore(0, {"params": wanted})["params"], weights.family


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """Tokens, logits, loss, gradients."""
    return load_file(FOLDERS / name / "reference.safetensors")


def computed(model: LanguageModel, params: dict, data: dict) -> tuple[np.ndarray, float, dict]:
    """Logits, mean loss and its gradients for a batch of the fixtures."""
    def mean(params):
        segments = data["real"].astype(np.int32)
        logits = model.logits(params, data["tokens"], positions_BL=data["positions"], segment_ids_BL=segments)
        losses, _ = cross_entropy(logits, data["targets"])
        return (losses * data["mask"]).sum() / data["mask"].sum(), logits

    options = {"xla_backend_optimization_level": 0}    # it runs once: compiling is what takes time
    (loss, logits), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True), compiler_options=options)(params)
    return np.asarray(logits), float(loss), gradients


def as_tensors(model: LanguageModel, family: Family, params: dict) -> dict[str, np.ndarray]:
    """Parameters, or gradients, under the names and in the layouts of the family."""
    out, flat = {}, flatten(params)
    for path, (stacked, names, bound) in sources(family, model.config, flatten(model.specs), family.prefix).items():
        for layer, name in enumerate(names):
            tensor = out.setdefault(name, np.full(bound.shape, np.nan, np.float32))
            block = np.asarray(flat[path][layer] if stacked else flat[path])
            write_from(block, bound, path, tensor, tuple(slice(0, n) for n in block.shape))
    return out
