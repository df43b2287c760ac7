"""What the model must do whatever its shape: causality, isolation, tied gradients, sums, one answer in every form."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlm.models
from jaxlm.config import ModelConfig
from jaxlm.models import build_model, rematerialisation
from partitioning.declaration import DeclarationError
from partitioning.mesh import AXES
from partitioning.unsharded import Unsharded
from tests.jaxlm.models.tiny import GPT2, LLAMA, B, L, batch, tiny


def value_and_grad(model, params, data, **options):
    return jax.jit(jax.value_and_grad(lambda p: (lambda s: s.loss + s.z_loss)(model.loss(p, data, **options))))(params)


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.parametrize("shape", [GPT2, LLAMA])
def test_a_later_token_leaves_the_bits_of_earlier_logits(shape):
    model, params = tiny(shape)
    f = jax.jit(model.logits)
    tokens = batch()["inputs"]
    changed = tokens.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 37
    before, after = f(params, tokens), f(params, changed)
    assert np.array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


def test_a_token_beyond_the_window_of_every_layer_has_no_effect():
    model, params = tiny(window_pattern=(2, 3))       # three layers see 1, 2 and 1 tokens back
    f = jax.jit(model.logits)
    tokens = batch()["inputs"]
    changed = tokens.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 37
    before, after = f(params, tokens), f(params, changed)
    assert np.array_equal(before[:, 7:], after[:, 7:])
    assert np.all(np.any(before[:, 6] != after[:, 6], axis=-1))


def test_packed_segments_equal_the_same_texts_alone_and_do_not_see_each_other():
    model, params = tiny()
    f = jax.jit(model.logits)
    tokens = batch()["inputs"]
    segments = np.broadcast_to(np.array([1] * 5 + [2] * 4 + [0] * 3, np.int32), (B, L))
    positions = np.broadcast_to(np.array([*range(5), *range(4), *range(3)], np.int32), (B, L))
    packed = f(params, tokens, positions_BL=positions, segment_ids_BL=segments)
    np.testing.assert_allclose(packed[:, 5:9], f(params, tokens[:, 5:9]), atol=2e-6)
    changed = np.where(segments == 1, (tokens + 1) % 37, tokens)
    again = f(params, changed, positions_BL=positions, segment_ids_BL=segments)
    assert np.array_equal(packed[:, 5:], again[:, 5:])


@pytest.mark.parametrize("shape", [GPT2, dict(LLAMA, window_pattern=(3, None), dropout=0.3)])
def test_unrolled_layers_give_the_numbers_of_the_scan(shape):
    data = batch()
    options = dict(z_loss=0.01, dropout=(jax.random.key(1), data["example"]))
    scanned, params = tiny(shape)
    unrolled, _ = tiny(shape, scan_layers=False)
    a, b = (value_and_grad(m, params, data, **options) for m in (scanned, unrolled))
    assert_trees_close(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_every_rematerialisation_gives_the_same_loss_and_gradients(scan):
    data = batch()
    options = dict(dropout=(jax.random.key(1), data["example"]))
    results = []
    policies = [("none",), ("full",), ("dots",), ("query", "mlp_out"), tuple(rematerialisation.NAMES)]
    for policy in policies if scan else policies[:3]:
        model, params = tiny(dict(LLAMA, dropout=0.2, num_layers=2), build=dict(remat=policy), scan_layers=scan)
        results.append(value_and_grad(model, params, data, **options))
    for other in results[1:]:
        assert_trees_close(results[0], other, rtol=1e-5, atol=1e-5)


def test_policies_keep_what_they_say():
    """Counts the products with weights and scores in the backward pass: full recomputes all, dots the scores, none nothing."""
    def products(policy):
        model, params = tiny(dict(LLAMA, num_layers=1), build=dict(remat=policy), scan_layers=False)
        return str(jax.make_jaxpr(jax.grad(lambda p: model.loss(p, batch()).loss))(params)).count("dot_general")

    none, dots, full, named = (products(p) for p in (("none",), ("dots",), ("full",), tuple(rematerialisation.NAMES)))
    assert none < dots < full
    assert named == none + 1                   # the scores, which have no name
    model, params = tiny(LLAMA, build=dict(remat=("none",)))
    assert "remat" not in str(jax.make_jaxpr(jax.grad(lambda p: model.loss(p, batch()).loss))(params))


@pytest.mark.parametrize("policy, message", [
    (("querry",), "'querry'.*did you mean 'query'"), (("none", "query"), "alone"), ((), "alone"),
    (("dot",), "did you mean 'dots'")])
def test_an_unknown_rematerialisation_is_refused_with_the_nearest_name(policy, message):
    with pytest.raises(DeclarationError, match=message):
        build_model(ModelConfig(), remat=policy)


def test_the_tied_table_gets_the_gradients_of_both_its_uses():
    tied, params = tiny(GPT2)
    untied, _ = tiny(GPT2, tie_embeddings=False)
    data = batch()
    both = value_and_grad(tied, params, data)[1]["embed"]["embedding"]
    split = value_and_grad(untied, {**params, "lm_head": {"kernel": params["embed"]["embedding"].T}}, data)[1]
    as_input, as_output = split["embed"]["embedding"], split["lm_head"]["kernel"].T
    assert np.any(as_input) and np.any(as_output)
    np.testing.assert_allclose(both, as_input + as_output, atol=1e-5)


def test_loss_is_a_sum_over_targets_that_adds_up_over_rows():
    model, params = tiny()
    data = batch()
    f = jax.jit(lambda p, d: model.loss(p, d, z_loss=0.1))
    whole = f(params, data)
    rows = [f(params, jax.tree.map(lambda x, i=i: x[i:i + 1], data)) for i in range(B)]
    assert_trees_close(whole, jax.tree.map(lambda *x: sum(x), *rows), rtol=1e-6)
    assert whole.targets == data["mask"].sum() and all(x.dtype == jnp.float32 for x in whole)
    logits = np.asarray(model.logits(params, data["inputs"]), np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, data["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(whole.loss, ((log_z - chosen) * data["mask"]).sum(), rtol=1e-5)
    np.testing.assert_allclose(whole.z_loss, 0.1 * (log_z ** 2 * data["mask"]).sum(), rtol=1e-5)


def test_a_batch_without_targets_gives_zero_and_a_zero_gradient():
    model, params = tiny()
    data = dict(batch(), mask=np.zeros((B, L), bool))
    sums = model.loss(params, data, z_loss=0.1)
    assert (sums.loss, sums.z_loss, sums.targets) == (0, 0, 0)
    assert all(not np.any(g) for g in jax.tree.leaves(value_and_grad(model, params, data, z_loss=0.1)[1]))


def test_masked_targets_have_no_effect_whatever_their_value():
    model, params = tiny()
    data = batch()
    changed = dict(data, targets=np.where(data["mask"], data["targets"], -100))
    a, b = (value_and_grad(model, params, d) for d in (data, changed))
    for a, b in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert np.array_equal(a, b)


def test_bfloat16_compute_casts_at_use_and_keeps_float32_logits_gradients_and_loss():
    model, params = tiny(build=dict(compute_dtype="bfloat16"))
    exact, _ = tiny()
    data = batch()
    logits = model.logits(params, data["inputs"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact.logits(params, data["inputs"]), atol=0.1)
    loss, grads = value_and_grad(model, params, data)
    assert loss.dtype == jnp.float32 and all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    text = str(jax.make_jaxpr(lambda p: model.logits(p, data["inputs"]))(params))
    wide = [line for line in text.splitlines() if "dot_general" in line and re.search(r":f32\[", line.split("=")[0])]
    assert 1 <= len(wide) <= 2                 # the attention scores and the logits are summed in float32


def test_parameters_have_their_own_dtype():
    model, params = tiny(build=dict(param_dtype="bfloat16"))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    assert all(s.dtype == jnp.bfloat16 for s in jax.tree.leaves(model.specs))


@pytest.mark.parametrize("shape", [GPT2, LLAMA, dict(LLAMA, qk_norm=True, bias=True)])
def test_specs_describe_what_init_gives(shape):
    model, params = tiny(shape)
    described, given = (jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree) for tree in (model.specs, params))
    assert described == given


def test_paths_and_dims_are_the_agreed_ones():
    specs = tiny()[0].specs
    attention, mlp = specs["layers"]["attention"], specs["layers"]["mlp"]
    assert attention["query"]["kernel"].dims == ("layers", "embed", "heads", "head_dim")
    assert attention["key"]["kernel"].dims == attention["value"]["kernel"].dims == ("layers", "embed", "kv_heads", "head_dim")
    assert attention["output"]["kernel"].dims == ("layers", "heads", "head_dim", "embed")
    assert mlp["gate"]["kernel"].dims == mlp["up"]["kernel"].dims == ("layers", "embed", "mlp")
    assert mlp["down"]["kernel"].dims == ("layers", "mlp", "embed")
    assert specs["embed"]["embedding"].dims == ("vocab", "embed") and specs["lm_head"]["kernel"].dims == ("embed", "vocab")
    assert specs["final_norm"]["scale"].dims == ("embed",)


def test_activations_list_every_constraint_that_the_model_makes():
    model, params = tiny()
    seen = {}

    class Recorder(Unsharded):
        def constrain(self, x, dims):
            seen[dims] = (x.shape, x.dtype)
            return x

    jax.eval_shape(lambda p: model.logits(p, batch()["inputs"], shard=Recorder()), params)
    declared = {spec.dims: (spec.shape, spec.dtype) for spec in model.activations(B, L).values()}
    declared.pop(("batch", "length"))          # the tokens, which arrive laid out
    assert seen == declared


def test_no_file_of_the_models_names_a_mesh_axis():
    quoted = re.compile(r"""["'](?:%s)["']""" % "|".join(AXES))
    files = list(pathlib.Path(jaxlm.models.__file__).parent.rglob("*.py"))
    assert len(files) > 5
    assert not [f.name for f in files if quoted.search(f.read_text())]


def test_a_sequence_longer_than_the_model_knows_is_refused():
    model, params = tiny()
    with pytest.raises(DeclarationError, match="33 tokens.*max_positions = 32"):
        model.logits(params, np.zeros((1, 33), np.int32))
    with pytest.raises(DeclarationError, match="33 tokens.*max_positions = 32"):
        model.init_cache(1, 33)


def test_an_unknown_attention_backend_is_refused_when_the_model_is_built():
    with pytest.raises(DeclarationError, match="config.kernels.attention.*'flash'"):
        build_model(ModelConfig(), attention_backend="flash")


def test_the_program_does_not_grow_with_depth():
    def size(layers):
        model = build_model(ModelConfig(**dict(LLAMA, num_layers=layers)))
        arrays = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), model.specs)
        step = jax.jit(jax.grad(lambda p: model.loss(p, batch()).loss))
        return len(step.lower(arrays).as_text())

    assert size(32) < 1.01 * size(8)


def test_options_that_are_off_cost_nothing():
    """No dropout and no segment ids: the program is the one of a model that never heard of them."""
    data = batch()
    plain, params = tiny(dropout=0.0)
    dropping, _ = tiny(dropout=0.5)

    def program(model, **options):
        return jax.jit(lambda p: model.loss(p, data, **options)).lower(params).as_text()

    reference = program(plain)
    assert program(dropping) == reference
    assert program(plain, dropout=(jax.random.key(0), data["example"])) == reference
    assert program(dropping, dropout=(jax.random.key(0), data["example"])) != reference
    assert "threefry" not in reference
