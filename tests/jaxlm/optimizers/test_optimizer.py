"""Optimizers equal optax's own, layer by layer, whatever the number formats and the mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.config import OPTIMIZERS, OptimizerConfig, PrecisionConfig
from jaxlm.optimizers import global_norm, make_optimizer, make_schedule
from jaxlm.optimizers.muon import matrix_sides
from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.padding import cut, fill
from partitioning.paths import flatten, map_paths
from tests.jaxlm.optimizers import small_model

STEPS = 20
WIDE = dict(embed=128, mlp=160, vocab=144)         # wide enough for Adafactor to factor
DECAY_MASK = (r".*/kernel",)


def declare(name, **changes):
    settings = dict(name=name, learning_rate=0.02, schedule="cosine", warmup_steps=3, clip_norm=1.0, decay_mask=DECAY_MASK)
    return OptimizerConfig(**{**settings, **changes})


def gradients(tree, step):
    return small_model.arrays(tree, 100 + step, size=1.0)


def train(config, tree, steps=STEPS, precision=PrecisionConfig()):
    """Parameters, slots and metrics after training on random gradients."""
    optimizer = make_optimizer(config, precision, STEPS, tree)
    update = jax.jit(lambda g, s, p, n: optimizer.update(g, s, p, step=n, updates=n))
    params = small_model.arrays(tree, 0)
    slots = optimizer.init(params)
    for n in range(steps):
        params, slots, metrics = update(gradients(tree, n), slots, params, jnp.int32(n))
    return params, slots, metrics


def plain(config):
    """The same mathematics as a chain of optax's, ignorant of stacking."""
    def mask(tree):
        return map_paths(lambda path, _: any(re.fullmatch(p, path) for p in config.decay_mask), tree)
    rate = make_schedule(config, STEPS)
    decay = optax.chain(optax.add_decayed_weights(config.weight_decay, mask), optax.scale_by_learning_rate(rate))
    clip = optax.clip_by_global_norm(config.clip_norm)
    masked = dict(weight_decay=config.weight_decay, mask=mask)
    betas = dict(b1=config.beta1, b2=config.beta2)
    return dict(
        adamw=lambda: optax.chain(clip, optax.adamw(rate, **betas, eps=config.epsilon, **masked)),
        lion=lambda: optax.chain(clip, optax.lion(rate, **betas, **masked)),
        sgd=lambda: optax.chain(clip, optax.trace(config.momentum), decay),
        adafactor=lambda: optax.chain(clip, optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0),
                                      optax.scale_by_param_block_rms(), decay),
        muon=lambda: optax.chain(clip, optax.contrib.muon(
            rate, beta=config.momentum, weight_decay=config.weight_decay, weight_decay_mask=mask, adam_b1=config.beta1,
            adam_b2=config.beta2, eps=config.epsilon, consistent_rms=0.2)),
    )[config.name]()


def train_plain(transform, params, all_gradients):
    @jax.jit
    def step(params, state, grads):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state
    state = transform.init(params)
    for grads in all_gradients:
        params, state = step(params, state, grads)
    return params


def distance(found, expected):
    """The largest relative difference of the arrays, each in the maximum norm."""
    found, expected = flatten(jax.device_get(found)), flatten(jax.device_get(expected))
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[p] - expected[p])) / np.max(np.abs(expected[p]))) for p in found)


def moved(params, tree):
    return distance(params, small_model.arrays(tree, 0))


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor"])
def test_unstacked_parameters_move_as_under_plain_optax(name):
    tree = {k: v for k, v in small_model.specs(**WIDE).items() if k != "layers"}
    config = declare(name)
    found, _, _ = train(config, tree)
    expected = train_plain(plain(config), small_model.arrays(tree, 0), [gradients(tree, n) for n in range(STEPS)])
    assert moved(found, tree) > 1e-2
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor"])
def test_stacked_layers_move_as_if_each_were_optimised_on_its_own(name):
    tree = small_model.specs(**WIDE)
    config = declare(name)
    found, _, _ = train(config, tree)
    alone = train_plain(plain(config), small_model.unstack(small_model.arrays(tree, 0)),
                        [small_model.unstack(gradients(tree, n)) for n in range(STEPS)])
    assert distance(small_model.unstack(found), alone) < 1e-6


def test_muon_orthogonalises_each_layers_matrix_on_its_own_and_gives_the_rest_to_adam():
    tree = small_model.specs()
    config = declare("muon", clip_norm=None)
    found, slots, _ = train(config, tree)
    fan_in = {"layers/attention/query/kernel": small_model.EMBED, "layers/attention/key/kernel": small_model.EMBED,
              "layers/attention/output/kernel": small_model.HEADS * small_model.HEAD_DIM,
              "layers/mlp/up/kernel": small_model.EMBED, "layers/mlp/down/kernel": small_model.MLP}

    def as_matrices(flat):                        # {path@layer: [fan in, fan out]}
        return {f"{p}@{i}": np.asarray(flat[p])[i].reshape(rows, -1)
                for p, rows in fan_in.items() for i in range(small_model.LAYERS)}

    def others(flat):
        return {p: x for p, x in flat.items() if p not in fan_in}

    start, steps = flatten(small_model.arrays(tree, 0)), [flatten(gradients(tree, n)) for n in range(STEPS)]
    rate = make_schedule(config, STEPS)
    muon = optax.contrib.muon(rate, beta=config.momentum, weight_decay=config.weight_decay, consistent_rms=0.2)
    expected = train_plain(muon, as_matrices(start), [as_matrices(g) for g in steps])
    assert distance(as_matrices(flatten(found)), expected) < 1e-6
    expected = train_plain(plain(declare("adamw", clip_norm=1e9)), others(start), [others(g) for g in steps])
    assert distance(others(flatten(found)), expected) < 1e-6
    assert set(flatten(slots["momentum"])) == set(fan_in)
    assert set(flatten(slots["mu"])) == set(flatten(slots["nu"])) == set(flatten(tree)) - set(fan_in)


def test_muons_step_is_an_orthogonal_matrix_of_root_mean_square_0_2_times_the_rate():
    tree = {"layers": {"mlp": {"up": {"kernel": ArraySpec((2, 32, 64), "float32", ("layers", "embed", "mlp"))}}}}
    config = declare("muon", schedule="constant", warmup_steps=0, weight_decay=0.0)
    found, _, _ = train(config, tree, steps=1)
    step = np.asarray(found["layers"]["mlp"]["up"]["kernel"] - small_model.arrays(tree, 0)["layers"]["mlp"]["up"]["kernel"])
    for layer in step:
        singular = np.linalg.svd(layer, compute_uv=False) / (0.02 * 0.2 * np.sqrt(64))
        assert 0.6 < singular.min() and singular.max() < 1.3          # five Newton-Schulz steps come this close to 1


def test_experts_count_matrices_too():
    spec = ArraySpec((3, 4, 16, 24), "float32", ("layers", "experts", "embed", "mlp"))
    assert matrix_sides(spec) == ((2,), (3,))


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_plain_application_to_stacked_arrays_is_another_optimizer(name):
    tree = small_model.specs(**WIDE)
    transform, start, steps = plain(declare(name)), small_model.arrays(tree, 0), [gradients(tree, n) for n in range(STEPS)]
    stacked = flatten(small_model.unstack(train_plain(transform, start, steps)))
    alone = flatten(train_plain(transform, small_model.unstack(start), [small_model.unstack(g) for g in steps]))
    unlike = {p for p in alone if distance({p: stacked[p]}, {p: alone[p]}) > 1e-3}
    assert {"layers/layer0/mlp/up/kernel", "layers/layer0/norm/scale"} <= unlike
    assert not unlike & {"final_norm/scale", "lm_head/kernel", "embed/embedding"}


def test_muons_adam_part_has_its_own_rate():
    tree = small_model.specs()
    one, _, metrics = train(declare("muon", adam_learning_rate=0.005), tree)
    other, _, _ = train(declare("muon"), tree)
    same = {p for p in flatten(tree) if distance({p: flatten(one)[p]}, {p: flatten(other)[p]}) == 0}
    assert same == {p for p, spec in flatten(tree).items() if matrix_sides(spec)}
    np.testing.assert_allclose(metrics["learning_rate"], 4 * metrics["adam_learning_rate"], rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_specs_describe_the_slots_exactly(name):
    tree = small_model.specs(**WIDE)
    optimizer = make_optimizer(declare(name), PrecisionConfig(optimizer="bfloat16"), STEPS, tree)
    slots = optimizer.init(small_model.arrays(tree, 0))
    described = jax.tree.map(lambda s: (s.shape, jnp.dtype(s.dtype)), optimizer.specs)
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype), slots)
    _, updated, _ = train(declare(name), tree, steps=1, precision=PrecisionConfig(optimizer="bfloat16"))
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype), updated)
    for arrays in optimizer.specs.values():
        assert flatten(arrays).keys() <= flatten(tree).keys()
        for path, spec in flatten(arrays).items():
            assert type(spec) is ArraySpec and set(spec.dims) <= set(flatten(tree)[path].dims)


def test_slots_have_plain_names():
    tree = small_model.specs(**WIDE)
    names = {name: set(make_optimizer(declare(name), PrecisionConfig(), STEPS, tree).specs) for name in OPTIMIZERS}
    assert names == dict(adamw={"mu", "nu"}, lion={"mu"}, sgd={"momentum"}, adafactor={"v_row", "v_col", "v"},
                         muon={"momentum", "mu", "nu"})
    assert make_optimizer(declare("sgd", momentum=0.0), PrecisionConfig(), STEPS, small_model.specs()).specs == {}


def test_adafactors_factored_slots_keep_the_dims_that_remain():
    optimizer = make_optimizer(declare("adafactor"), PrecisionConfig(), STEPS, small_model.specs(**WIDE))
    row, col, full = (flatten(optimizer.specs[name]) for name in ("v_row", "v_col", "v"))
    path = "layers/mlp/up/kernel"
    assert row[path] == ArraySpec((3, 128), np.dtype("float32"), ("layers", "embed"))
    assert col[path] == ArraySpec((3, 160), np.dtype("float32"), ("layers", "mlp"))
    assert path not in full and "layers/norm/scale" in full and "layers/attention/query/kernel" in full
    assert full.keys() | row.keys() == flatten(small_model.specs()).keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16_state_is_rounded_only_when_stored(name):
    """Two steps: the second, from bfloat16 slots and parameters, equals the float32 step from the same values."""
    narrow, wide = small_model.specs("bfloat16", **WIDE), small_model.specs(**WIDE)
    config = declare(name)
    low = make_optimizer(config, PrecisionConfig(optimizer="bfloat16"), STEPS, narrow)
    high = make_optimizer(config, PrecisionConfig(), STEPS, wide)
    params = small_model.arrays(narrow, 0)
    params, slots, _ = jax.jit(low.update)(gradients(narrow, 0), low.init(params), params, step=0, updates=0)
    assert {x.dtype.name for x in jax.tree.leaves((params, slots))} == {"bfloat16"}
    grads = gradients(narrow, 1)
    float32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)                  # noqa: E731
    found = jax.jit(low.update)(grads, slots, params, step=1, updates=1)
    expected = jax.jit(high.update)(float32(grads), float32(slots), float32(params), step=1, updates=1)
    for have, want in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(expected[:2])):
        want = want.astype(jnp.bfloat16)
        assert jnp.mean(have == want) > 0.999                       # up to an ulp of float32 before rounding
    np.testing.assert_allclose(found[2]["grad_norm"], expected[2]["grad_norm"], rtol=1e-6)


def test_the_gradient_norm_is_summed_in_float32_and_reported_before_clipping():
    tree = {"w": {"kernel": ArraySpec((4096,), "bfloat16", (None,))},
            "v": {"kernel": ArraySpec((2, 3), "bfloat16", (None, None))}}
    grads = jax.tree.map(lambda s: jnp.full(s.shape, 0.5, jnp.bfloat16), tree)
    optimizer = make_optimizer(declare("sgd", clip_norm=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", warmup_steps=0),
                               PrecisionConfig(), STEPS, tree)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), grads)
    moved_to, _, metrics = optimizer.update(grads, {}, zeros, step=0, updates=0)
    np.testing.assert_allclose(metrics["grad_norm"], 0.5 * np.sqrt(4102), rtol=1e-6)
    np.testing.assert_allclose(global_norm(moved_to), 0.02 * 0.1, rtol=1e-6)


def test_weight_decay_shrinks_what_the_mask_names_and_nothing_else():
    tree = small_model.specs()
    config = declare("sgd", momentum=0.0, weight_decay=0.5, schedule="constant", warmup_steps=0,
                     decay_mask=(r".*/up/kernel", r"lm_head/.*"))
    optimizer = make_optimizer(config, PrecisionConfig(), STEPS, tree)
    params = small_model.arrays(tree, 0)
    found, _, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), {}, params, step=0, updates=0)
    ratio = {p: np.mean(np.float64(flatten(found)[p]) / np.float64(flatten(params)[p])) for p in flatten(params)}
    assert {p for p, r in ratio.items() if r != 1} == {"layers/mlp/up/kernel", "lm_head/kernel"}
    assert ratio["lm_head/kernel"] == pytest.approx(1 - 0.02 * 0.5, rel=1e-6)


@pytest.mark.parametrize("mask, words", [
    ((r".*/kernel", r"lm_heads/kernel"), r"'lm_heads/kernel' matches no parameter.*nearest paths: lm_head/kernel"),
    ((r"kernel",), r"'kernel' matches no parameter"),
    ((r".*/(kernel",), r"no regular expression"),
])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_decay_mask_that_matches_nothing_is_refused(mask, words, weight_decay):
    config = declare("adamw", decay_mask=mask, weight_decay=weight_decay)
    with pytest.raises(DeclarationError, match=words):
        make_optimizer(config, PrecisionConfig(), STEPS, small_model.specs())


def test_float16_second_moments_are_refused():
    with pytest.raises(DeclarationError, match="precision.optimizer = 'float16'"):
        make_optimizer(declare("adamw"), PrecisionConfig(optimizer="float16"), STEPS, small_model.specs())


def test_parameters_of_another_model_are_refused_by_path():
    tree = small_model.specs()
    optimizer = make_optimizer(declare("adamw"), PrecisionConfig(), STEPS, tree)
    with pytest.raises(ValueError, match="lm_head/kernel"):
        optimizer.init({k: v for k, v in small_model.arrays(tree, 0).items() if k != "lm_head"})


RULES = dict(embed="fsdp", heads="tensor", kv_heads="tensor", mlp="tensor", vocab="tensor")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zero", [1, 3])
def test_eight_devices_take_the_steps_of_one(name, zero):
    tree = small_model.specs(**WIDE)
    optimizer = make_optimizer(declare(name), PrecisionConfig(), STEPS, tree)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))

    def sharding(rules):
        return lambda spec: NamedSharding(mesh, PartitionSpec(*(rules.get(d) for d in spec.dims)))
    unspread = {k: v for k, v in RULES.items() if v != "fsdp"}
    param_shardings = jax.tree.map(sharding(RULES if zero == 3 else unspread), tree)
    slot_shardings = jax.tree.map(sharding(RULES), optimizer.specs)
    update = jax.jit(lambda g, s, p, n: optimizer.update(g, s, p, step=n, updates=n, accept=jnp.isfinite),
                     out_shardings=(param_shardings, slot_shardings, None))
    params = jax.device_put(small_model.arrays(tree, 0), param_shardings)
    slots = jax.device_put(optimizer.init(params), slot_shardings)
    for n in range(5):
        grads = jax.device_put(gradients(tree, n), param_shardings)
        params, slots, metrics = update(grads, slots, params, jnp.int32(n))
    expected, expected_slots, expected_metrics = train(declare(name), tree, steps=5)
    assert distance(params, expected) < 1e-6
    assert distance(slots, expected_slots) < 1e-5
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_padding_stays_zero_and_changes_no_other_number(name):
    """Adafactor's means and Muon's matrices and scales are those of the true shapes; the rest leaves zeros where they are."""
    tree = small_model.specs(**WIDE)
    padded = jax.tree.map(lambda spec: spec.padded(dict(vocab=176, mlp=192, heads=8, kv_heads=4)), tree)
    optimizer = make_optimizer(declare(name), PrecisionConfig(), STEPS, padded)
    shardings = [jax.tree.map(lambda spec: NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor")),
                 PartitionSpec(*(RULES.get(d) for d in spec.dims))), specs) for specs in (padded, optimizer.specs)]
    update = jax.jit(lambda g, s, p, n: optimizer.update(g, s, p, step=n, updates=n), out_shardings=(*shardings, None))

    def placed(true):
        return jax.device_put(jax.tree.map(lambda x, spec: fill(x, spec.shape), true, padded), shardings[0])

    params = placed(small_model.arrays(tree, 0))
    slots = jax.device_put(optimizer.init(params), shardings[1])
    for n in range(5):
        params, slots, metrics = update(placed(gradients(tree, n)), slots, params, jnp.int32(n))
    expected, expected_slots, expected_metrics = train(declare(name), tree, steps=5)
    for found, specs, want, bound in ((params, padded, expected, 1e-6), (slots, optimizer.specs, expected_slots, 1e-5)):
        true = jax.tree.map(lambda x, spec: cut(x, spec.true_shape), found, specs)
        assert distance(true, want) < bound
        jax.tree.map(lambda x, t: np.testing.assert_equal(np.count_nonzero(x), np.count_nonzero(t)), found, true)
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-6)
