"""The shipped sharding presets: what each comes to, its memory to the byte, and that it trains as one device does.

    python -m tests.system.test_presets          writes the golden files anew, after a change that was meant
"""

import math
import pathlib

import jax
import pytest

from jaxlm.commandline import load_config
from jaxlm.compiled import compile_for, printed_by_xla, rematerialised
from jaxlm.job import build_job
from jaxlm.presets import shipped_presets
from jaxlm.train import compile_train_step
from jaxlm.train_step import loss_and_gradients
from partitioning import memory_per_device, text
from tests.system.curves import compare, config_of, curve, is_equal, one_device

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "sharding"
PRESETS = sorted(shipped_presets())
DEVICES = 8


def golden(name: str) -> str:
    return text(build_job(config_of(sharding__preset=name), DEVICES).layout)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_comes_to_is_written_down(name):
    found, expected = golden(name), (GOLDEN / f"{name}.txt").read_text("utf-8")
    assert found == expected, f"{name} lays arrays elsewhere. If that was meant: python -m tests.system.test_presets"


def test_no_golden_file_is_left_over():
    assert sorted(path.stem for path in GOLDEN.iterdir()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_as_one_device_does(name):
    steps = 5
    ours = curve(config_of(sharding__preset=name), DEVICES, steps)
    figures = compare(ours, tuple(figure[:steps] for figure in one_device()))
    assert is_equal(figures), figures


def bytes_of(tree) -> int:
    """Bytes that one device holds of abstract arrays."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def state_bytes(job) -> int:
    """Bytes of the compiled step's arguments on one device, without the batch and the counters."""
    arguments = compile_train_step(job).memory_analysis().argument_size_in_bytes
    batch = job.abstract_batch()
    del batch["example"]                       # without dropout nothing reads the numbers of the examples, and JAX drops them
    return arguments - bytes_of(batch) - bytes_of(job.abstract_state()["counters"])


def gradient_bytes(job) -> int:
    """Bytes on one device of what the gradient function alone returns, wherever the compiler lets it lie."""
    def gradients(params, batch):
        def objective(params, microbatch):
            sums = job.model.loss(params, microbatch, shard=job.layout)
            return sums.loss, sums.loss
        return loss_and_gradients(objective, params, batch, accumulation=1, dtype=job.config.precision.gradients)[1]

    compiled = jax.jit(gradients).lower(job.abstract_state()["params"], job.abstract_batch()).compile()
    results = len(jax.tree.leaves(job.layout.gradients, is_leaf=lambda spec: isinstance(spec, jax.sharding.PartitionSpec)))
    return compiled.memory_analysis().output_size_in_bytes - 8 * results       # the CPU's table of the results


def predicted(job) -> tuple[int, int]:
    """(parameters and optimizer state, gradients) as the report says."""
    found = memory_per_device(job.layout)
    return found["params"] + found["optimizer"], found["gradients"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_memory_that_is_predicted_is_that_of_the_compiled_step_to_the_byte(name):
    job = build_job(config_of(sharding__preset=name), DEVICES).on_devices()
    assert (state_bytes(job), gradient_bytes(job)) == predicted(job)


@pytest.mark.parametrize("sharding", [dict(rules=dict(layers="fsdp")), dict(gradients=dict(rules=dict(layers="fsdp"))),
                                      dict(overrides=(("layers/mlp/.*/kernel", ("fsdp", None, None)),))], ids=str)
def test_so_is_that_of_declarations_that_split_the_layers(sharding):
    keys = {f"sharding__{key}": value for key, value in sharding.items()}
    job = build_job(config_of(mesh__fsdp=4, mesh__data=2, **keys), DEVICES).on_devices()
    assert (state_bytes(job), gradient_bytes(job)) == predicted(job)


def test_the_default_model_s_memory_too():
    config = load_config("shakespeare", [("model.num_layers", "2"), ("sharding.preset", "hybrid_optimizer")])
    job = build_job(config, DEVICES).on_devices()
    assert (state_bytes(job), gradient_bytes(job)) == predicted(job)


def test_a_prediction_for_another_stage_is_seen():
    two, three = (build_job(config_of(sharding__preset=name), DEVICES).on_devices() for name in ("zero2", "zero3"))
    assert state_bytes(two) != predicted(three)[0]
    one = build_job(config_of(sharding__preset="zero1"), DEVICES).on_devices()
    assert gradient_bytes(one) != predicted(two)[1]


TWO_LAYERS = [("model.num_layers", "2")]
OTHERWISE = [("precision.compute", "bfloat16"), ("train.gradient_accumulation", "2"), ("train.global_batch_size", "16")]


def remarks(*overrides: tuple[str, str]) -> list[str]:
    """What the partitioner had to say of the step of the default model with two layers."""
    job = build_job(load_config("shakespeare", [*TWO_LAYERS, *overrides]), DEVICES)
    return compile_for(job, jax.devices()[:DEVICES])[1]


@pytest.mark.parametrize("changes", [[], OTHERWISE], ids=["float32", "bfloat16 with accumulation"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_partitioner_rematerialises_nothing_involuntarily(name, changes):
    assert remarks(("sharding.preset", name), *changes) == []


def test_where_it_has_to_that_is_seen():
    """From two dims over two axes to one dim over all three: XLA has no way but the whole array."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def lay(x, *spec):
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    with printed_by_xla() as printed:
        jax.jit(lambda x: lay(jax.numpy.sin(lay(x, "a", "b", None)), None, ("a", "b", "c"), None)).lower(
            jax.numpy.ones((8, 8, 8))).compile()
    assert [("f32[4,4,8] whole" in remark) for remark in rematerialised("".join(printed))] == [True]


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for preset in PRESETS:
        (GOLDEN / f"{preset}.txt").write_text(golden(preset), "utf-8")
