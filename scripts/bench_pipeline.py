"""What a pipeline costs beside its bubbles: each schedule's step on simulated devices against the step of one device.

    python scripts/bench_pipeline.py                          all schedules, 4 stages, 16 microbatches
    python scripts/bench_pipeline.py --schedules=one_f_one_b

Simulated devices share the cores, so an idle stage costs nothing and what is measured is work: what is computed twice, buffers,
switches and exchanges. The bubble is another figure, modelled from the table (`explain --schedule`), and stands beside it. All
programs run in turn, several rounds; figures are medians of their ratios to the step of one device in the same round.

Both sides compute as much again: `recompute` with no rematerialisation in the layers against full rematerialisation, `saved` with
that of the default (dots) against the same.
"""

import argparse
import dataclasses
import json
import statistics
import time

import numpy as np

MODEL = {"model.num_layers": 8, "model.embed_dim": 256, "model.num_heads": 8, "model.num_kv_heads": 4, "model.mlp_dim": 704,
         "model.vocab_size": 1024, "model.max_positions": 256, "data.sequence_length": 256, "train.global_batch_size": 16}
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v")
REMAT = {"recompute": ("none", "full"), "saved": ("dots", "dots")}      # (in the pipeline's layers, on one device)


class Program:
    """A compiled step with a state and a batch of its own."""

    def __init__(self, devices: int, **keys):
        import jax

        from jaxlm.commandline import load_config
        from jaxlm.job import build_job
        from jaxlm.train import compile_train_step
        config = load_config("shakespeare", [(key, str(value)) for key, value in (MODEL | keys).items()])
        self.job = build_job(config, devices).on_devices(jax.devices()[:devices])
        self.step, self.state = compile_train_step(self.job), self.job.initialise()
        rows, length = config.train.global_batch_size, config.data.sequence_length
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, length + 1)).astype(np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((rows, length), bool),
                 "example": np.arange(rows, dtype=np.int32)}
        self.batch = jax.device_put(batch, self.job.batch_shardings())
        self.seconds()                                         # the first run warms up

    def seconds(self) -> float:
        import jax
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start


def main() -> None:
    out = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out.add_argument("--stages", type=int, default=4)
    out.add_argument("--microbatches", type=int, default=16)
    out.add_argument("--rounds", type=int, default=5)
    out.add_argument("--schedules", default=",".join(SCHEDULES))
    out.add_argument("--residuals", default=",".join(REMAT))
    flags = out.parse_args()
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.stages)

    from partitioning.pipeline import COSTS
    from partitioning.schedules import measure
    for residuals in flags.residuals.split(","):
        inside, outside = REMAT[residuals]
        programs = {"one device": Program(1, **{"mesh.data": 1, "train.remat": outside})}
        for schedule in flags.schedules.split(","):
            programs[schedule] = Program(flags.stages, **{
                "mesh.pipe": flags.stages, "pipeline.schedule": schedule, "pipeline.num_microbatches": flags.microbatches,
                "pipeline.residuals": residuals, "train.remat": inside})
        found: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(flags.rounds):
            for name in sorted(programs, reverse=bool(number % 2)):
                found[name].append(programs[name].seconds())
        for name, program in programs.items():
            ratios = [ours / one for ours, one in zip(found[name], found["one device"], strict=True)]
            row = {"residuals": residuals, "program": name, "seconds": round(statistics.median(found[name]), 3),
                   "work_ratio": round(statistics.median(ratios), 3)}
            if program.job.table is not None:
                figures = dataclasses.asdict(measure(program.job.table, COSTS[residuals]))
                row |= {"modelled_bubble": round(figures["time_bubble"], 3),
                        "modelled_time_ratio": round(figures["time_ratio"], 3),
                        "temporary_bytes": program.step.memory_analysis().temp_size_in_bytes}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
