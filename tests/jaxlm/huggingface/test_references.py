"""Logits, loss and gradients of every family are those of `transformers`: its kept figures everywhere, a live run where it is."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tests.jaxlm.huggingface.models import FOLDERS, NAMES, as_tensors, computed, read, reference

MAKER = pathlib.Path(__file__).parents[3] / "scripts" / "make_huggingface_fixtures.py"


def test_the_fixtures_are_small():
    assert sum(path.stat().st_size for path in FOLDERS.rglob("*")) < 2_000_000


def hold(model, params, family, data):
    logits, loss, gradients = computed(model, params, data)
    real = data["real"].astype(bool)
    np.testing.assert_allclose(logits[real], data["logits"][real], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, data["loss"], rtol=0, atol=1e-5)
    ours = as_tensors(model, family, gradients)
    theirs = {name.removeprefix("gradient/"): x for name, x in data.items() if name.startswith("gradient/")}
    assert ours.keys() == theirs.keys() and all(np.abs(x).max() > 1e-6 for x in theirs.values())
    for name, gradient in theirs.items():
        np.testing.assert_allclose(ours[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients_are_those_of_transformers(name):
    model, params, family = read(FOLDERS / name)
    assert np.abs(reference(name)["logits"]).max() > 0.5
    hold(model, params, family, reference(name))


@pytest.mark.parametrize("name", NAMES)
def test_and_live_where_torch_and_transformers_are(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("maker", MAKER)
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    theirs, data = maker.build(name, 100), maker.batch(101)
    theirs.save_pretrained(tmp_path)
    hold(*read(tmp_path), data | maker.reference(theirs, data))
