"""What training moves between GPUs, read from programs that XLA compiles for real topologies of H200s (no GPU is needed)."""

import functools
import json
import os
import subprocess
import sys

import pytest

from partitioning import DeclarationError, target
from tests.jaxlm.test_explain import ROOT

LLAMA_8B, LLAMA_70B = 8_030_261_248, 70_553_706_496


@functools.cache
def explained(*arguments):
    """The report of `python -m jaxlm.explain --target=h200` with its collectives; a skip where XLA's CUDA compiler is not."""
    try:
        target("h200").devices(1)
    except DeclarationError as error:
        pytest.skip(str(error))
    words = [sys.executable, "-m", "jaxlm.explain", "--target=h200", "--json", *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def moved(report, **fields) -> int:
    """Bytes that one device sends in the collectives with these fields."""
    return sum(row["moved"] for row in report["collectives"] if all(row[key] == value for key, value in fields.items()))


@pytest.mark.slow
@pytest.mark.parametrize("parameters, arguments", [
    (LLAMA_8B, ("--config=llama3_8b", "--simulate_devices=8", "--config.mesh.fsdp=8", "--config.train.global_batch_size=8")),
    (LLAMA_70B, ("--config=llama3_70b", "--simulate_devices=512", "--config.mesh.fsdp=512", "--config.mesh.tensor=1",
                 "--config.train.global_batch_size=512")),
], ids=["8B on 8", "70B on 512"])
def test_fully_sharded_training_moves_what_the_textbook_says(parameters, arguments):
    """Parameters gathered in bfloat16 once forward and once backward, gradients reduced in float32 once: (n-1)/n of each."""
    report = explained(*arguments)
    assert report["totals"]["params"]["bytes"] == 4 * parameters
    n = report["devices"]
    textbook = parameters * (2 + 2 + 4) * (n - 1) / n
    assert abs(moved(report) / textbook - 1) <= 0.05
    assert {tuple(row["axes"]) for row in report["collectives"]} == {("fsdp",)}
    assert moved(report, kind="all-reduce") < 1000               # the loss, the count of targets and the norm
    assert moved(report, kind="all-gather", dtype="float32") < 1e-3 * textbook      # gains of norms
    layers = sum(row["bytes"] for row in report["arrays"] if row["kind"] == "gradients" and row["path"].startswith("layers/"))
    scattered = [row for row in report["collectives"] if row["kind"] == "reduce-scatter"]
    assert {row["dtype"] for row in scattered} == {"float32"}
    assert sum(row["bytes"] for row in scattered if row["in_loop"]) == layers        # layer by layer, as backward goes
    assert report["memory"]["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("compute, gradients, reduced", [("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32"),
                                                         ("float32", "bfloat16", "float32")])
def test_gradients_are_reduced_in_their_own_dtype_and_never_one_narrower_than_the_computation(compute, gradients, reduced):
    report = explained("--config=shakespeare", "--simulate_devices=8", "--config.mesh.fsdp=8", "--config.model.num_layers=2",
                       f"--config.precision.compute={compute}", f"--config.precision.gradients={gradients}")
    scattered = {(row["dtype"], row["in_loop"]) for row in report["collectives"]
                 if row["kind"] == "reduce-scatter" and row["bytes"] > 10_000}       # more than the gains of norms
    assert scattered == {(reduced, True), (reduced, False)}


@pytest.mark.slow
def test_biases_learned_positions_and_tied_tables_are_reduced_in_float32_and_scattered():
    """A GPT-2 in bfloat16: nothing is summed over the batch in bfloat16, and no gradient of size is ever summed whole."""
    report = explained("--config=gpt2_124m", "--simulate_devices=8", "--config.sharding.preset=fully_sharded",
                       "--config.model.num_layers=2", "--config.train.global_batch_size=16",
                       "--config.precision.compute=bfloat16", "--config.data.train=embedded:shakespeare",
                       "--config.data.tokenizer=bytes")
    summed = [row for row in report["collectives"] if row["kind"] in ("reduce-scatter", "all-reduce")]
    assert {row["dtype"] for row in summed if row["bytes"] > 100} == {"float32"}
    assert max(row["bytes"] for row in summed if row["kind"] == "all-reduce") < 100
    bytes_of = {row["path"]: row["bytes"] for row in report["arrays"] if row["kind"] == "gradients"}
    # Once for each use: as a lookup and as the output.
    assert moved(report, kind="reduce-scatter") == (sum(bytes_of.values()) + bytes_of["embed/embedding"]) * 7 / 8


@pytest.mark.slow
@pytest.mark.parametrize("spread", [(), ("--config.sharding.optimizer.spread=data",)], ids=["hybrid", "optimizer over data"])
def test_hybrid_sharding_scatters_inside_a_host_and_sums_only_shards_across(spread):
    report = explained("--config=llama3_8b", "--simulate_devices=16", "--config.mesh.fsdp=8", "--config.mesh.data=2",
                       "--config.train.global_batch_size=16", "--config.model.num_layers=8", *spread)
    params = {row["path"]: row["bytes"] / 4 for row in report["arrays"] if row["kind"] == "params"}
    tables = params["embed/embedding"] + params["lm_head/kernel"]                # gathered once, not twice
    inside, across = moved(report, axes=["fsdp"]), moved(report, axes=["data"])
    assert abs(inside / ((sum(params.values()) * (2 + 2 + 4) - tables * 2) * 7 / 8) - 1) <= 0.001
    shard = 4 * sum(params.values()) / 8
    # Each gradient's shard is summed once (twice 1/2 of it is sent); a spread optimizer's new parameters are gathered once.
    assert abs(moved(report, axes=["data"], kind="all-reduce") / shard - 1) <= 0.001
    assert abs((across - moved(report, axes=["data"], kind="all-reduce")) / shard - (0.5 if spread else 0)) <= 0.001
    assert moved(report) - inside - across < 1e-4 * inside                       # gains of norms, and scalars


TWO_D = ("--config=llama3_70b", "--simulate_devices=512", "--config.mesh.fsdp=64", "--config.mesh.tensor=8",
         "--config.train.global_batch_size=64")
STREAM = 8192 * 8192 * 2       # bytes of one row of the residual stream, in bfloat16
LAYERS = 80


@pytest.mark.slow
def test_tensor_sharding_sums_what_each_part_puts_out_and_moves_no_scores():
    report = explained(*TWO_D)
    assert {row["kind"] for row in report["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    inside = [row for row in report["collectives"] if row["in_loop"] and "tensor" in row["axes"]]
    # Per layer: two sums forward; the attention's once more, as it is recomputed; and two backward, of the inputs' gradients.
    # Of the loss, which is taken of some tokens at a time: each token's largest logit, its sum and its target's logit.
    assert [(row["kind"], row["dtype"], row["bytes"]) for row in inside] == [
        ("all-reduce", "bfloat16", 5 * LAYERS * STREAM), ("all-reduce", "float32", 3 * 8192 * 4)]


@pytest.mark.slow
def test_sequence_sharding_halves_each_sum_and_gathers_in_the_compute_dtype():
    report = explained(*TWO_D, "--config.sharding.activations.rules.stream_length=tensor")
    assert "all-to-all" not in {row["kind"] for row in report["collectives"]}
    inside = {(row["kind"], row["dtype"]): row["bytes"] for row in report["collectives"]
              if row["in_loop"] and row["axes"] == ["tensor"] and row["bytes"] > STREAM}
    assert inside == {("reduce-scatter", "bfloat16"): 5 * LAYERS * STREAM, ("all-gather", "bfloat16"): 6 * LAYERS * STREAM}
    whole = explained(*TWO_D)["memory"]["temporary"]
    assert report["memory"]["temporary"] < whole / 2
    table = next(row["bytes"] for row in report["arrays"] if row["path"] == "embed/embedding")
    outside = [row["bytes"] for row in report["collectives"] if not row["in_loop"] and "tensor" in row["axes"]]
    assert max(outside) < table / 8                              # neither the table nor its gradient moves along tensor
