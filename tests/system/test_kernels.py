"""One answer, whichever kernels compute it: every backend trains to the curve of one device, on meshes and in pipelines."""

import pytest

from jaxlm.job import build_job
from partitioning.declaration import DeclarationError
from tests.system.curves import compare, config_of, curve, is_equal, one_device

PALLAS = dict(kernels__attention="pallas", kernels__interpret=True)
CHUNKED = dict(kernels__attention="chunked")
LOSS = dict(kernels__cross_entropy="chunked", optimizer__z_loss=1e-3)
PIPELINE = dict(model__num_layers=4, mesh__pipe=2, pipeline__num_microbatches=2)
FORMS = {
    "chunked": (1, CHUNKED),
    "chunked, all axes": (8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, **CHUNKED)),
    "chunked, pipeline": (4, dict(mesh__tensor=2, **PIPELINE, **CHUNKED)),
    "chunked, split backward": (4, dict(mesh__fsdp=2, pipeline__schedule="zero_bubble", pipeline__residuals="saved", **PIPELINE,
                                        **CHUNKED)),
    "loss, all axes": (8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, **LOSS)),
    "loss, pipeline, sequence": (8, dict(mesh__tensor=2, mesh__fsdp=2, sharding__activations=dict(rules=dict(
        stream_length="tensor")), **PIPELINE, **LOSS)),
    "pallas": (1, PALLAS),
    "pallas, fsdp and tensor": (4, dict(mesh__fsdp=2, mesh__tensor=2, **PALLAS)),
    "pallas, pipeline": (4, dict(mesh__tensor=2, pipeline__residuals="saved", **PIPELINE, **PALLAS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_curve_is_that_of_plain_xla_on_one_device(form):
    devices, leaves = FORMS[form]
    objective = {key: value for key, value in leaves.items() if key == "optimizer__z_loss"}
    figures = compare(curve(config_of(**leaves), devices), one_device(**objective))
    assert is_equal(figures), figures


def test_a_length_that_the_rules_split_is_refused_with_the_reason():
    leaves = dict(mesh__tensor=2, sharding__activations=dict(rules=dict(length="tensor", heads=None, kv_heads=None, mlp=None,
                                                                        vocab=None, stream_length="tensor")))
    with pytest.raises(DeclarationError, match="split the query's length along tensor"):
        curve(config_of(**leaves, **CHUNKED), 2, 1)


def test_a_backend_that_is_asked_for_where_it_cannot_run_is_a_mistake_of_the_configuration():
    with pytest.raises(DeclarationError, match="config.kernels.attention.*'pallas'.*GPUs of NVIDIA"):
        curve(config_of(kernels__attention="pallas"), 1, 1)
    build_job(config_of(kernels__attention="pallas"), 1)
