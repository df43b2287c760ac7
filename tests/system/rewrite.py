"""Reads a checkpoint and writes it again, as one of the processes of a job: `rewrite.py FROM TO STEP KEY=VALUE...`.

What the job is comes from the configuration of FROM, which TO gets too, and the keys; which process this
is, from JAXLM_COORDINATOR and so on.
"""

import pathlib
import sys

from jaxlm import distributed
from jaxlm.checkpoints import Checkpoints
from jaxlm.commandline import load_config
from jaxlm.run_directory import save_config


def main(source: str, to: str, step: str, *keys: str) -> None:
    import jax

    config = load_config(f"{source}/config.json", [tuple(key.split("=", 1)) for key in keys])
    distributed.initialize(config.distributed)
    from jaxlm.job import build_job

    job = build_job(config, jax.device_count()).on_devices()
    reader = Checkpoints(pathlib.Path(source, "checkpoints"))
    assert reader.damage(int(step)) == []
    state = job.from_saved(reader.restore(int(step), job.abstract_saved()))
    # No process holds more of the parameters than the layout gives to its devices.
    rows = {row.path: row for row in job.layout.rows if row.kind == "params"}
    held = sum(shard.data.nbytes for x in jax.tree.leaves(state["params"]) for shard in x.addressable_shards)
    assert held == jax.local_device_count() * sum(row.bytes_per_device for row in rows.values())
    writer = Checkpoints(pathlib.Path(to, "checkpoints"), config.checkpoint)
    writer.save(int(step), job.to_saved(state), reader.about(int(step)))
    writer.close()
    if jax.process_index() == 0:
        save_config(pathlib.Path(to), load_config(f"{source}/config.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
