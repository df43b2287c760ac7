"""The step through a pipeline, compiled for GPUs that are not here: stages on hosts of their own, fsdp and tensor inside."""

import pytest

from jaxlm import compiled
from jaxlm.job import build_job
from partitioning.declaration import DeclarationError
from partitioning.targets import target
from tests.partitioning.programs import computations, ticks_and_permutes
from tests.system.curves import config_of

DEVICES = 32                                   # four hosts


@pytest.fixture(scope="module")
def chip():
    found = target("h200")
    try:
        found.devices(DEVICES)
    except DeclarationError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule, residuals", [
    ("gpipe", "recompute"), ("one_f_one_b", "recompute"), ("one_f_one_b", "saved"), ("interleaved", "saved"),
    ("zero_bubble", "saved"), ("zero_bubble_v", "recompute")])
def test_the_step_compiles_with_two_exchanges_in_a_tick_and_none_in_a_branch(schedule, residuals, chip):
    config = config_of(model__num_layers=8, mesh__pipe=4, mesh__fsdp=4, mesh__tensor=2, mesh__data=1, pipeline__schedule=schedule,
                       pipeline__num_microbatches=8, pipeline__residuals=residuals, train__global_batch_size=32,
                       precision__compute="bfloat16")
    job = build_job(config, DEVICES, chip.machine(DEVICES))
    step, notes = compiled.compile_for(job, chip.devices(DEVICES))
    assert not notes                           # nothing that the partitioner could only replicate
    text = step.as_text()
    loop, exchanged, inside = ticks_and_permutes(computations(text))
    assert len(exchanged) == 2 and not inside
    assert f'"known_trip_count":{{"n":"{len(job.table.ticks)}"}}' in loop
    rows = compiled.collectives_of(step, job)
    permuted, = [row for row in rows if row["kind"] == "collective-permute" and row["in_loop"]]
    assert tuple(permuted["axes"]) == ("pipe",) and permuted["count"] == 2 * len(job.table.ticks)
    # Beside the loop the ends' gradients are summed, and chunks go to their stages and back. No stage gathers another's layers.
    assert not [row for row in rows if row["kind"] in ("all-gather", "all-to-all") and "pipe" in row["axes"]]
