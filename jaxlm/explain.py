"""`python -m jaxlm.explain`: where every array of a configuration lies, why, and what it weighs on each device.

    python -m jaxlm.explain --config=llama3_70b --simulate_devices=512

The answer comes from shapes and the declared tables: it is the layout that training on that number of devices uses.
Nothing is allocated and no accelerator is needed, not even to compile the step for one:

    python -m jaxlm.explain --config=llama3_70b --simulate_devices=512 --target=h200 --config.mesh.fsdp=-1

`--schedule` draws what the stages of a pipeline do, tick by tick.
"""

import dataclasses
import json
import pathlib
import sys

from jaxlm import xla_flags
from jaxlm.commandline import configured, parser, run
from partitioning import schedules
from partitioning.declaration import DeclarationError
from partitioning.pipeline import COSTS
from partitioning.targets import DEVICES_PER_HOST, target


def arguments():
    """The command's flags."""
    out = parser("jaxlm.explain", "Print every array's shape, dims, sharding and bytes per device, and what decided it.")
    out.add_argument("--compile", action="store_true",
                     help="also compile the training step: its collectives and its memory, for the devices that are here")
    out.add_argument("--target", metavar="CHIP", help="compile for GPUs that need not be here (h200, a100): does the step fit?")
    out.add_argument("--schedule", action="store_true", help="also draw the pipeline's schedule: which stage does what when")
    out.add_argument("--html", metavar="FILE", help="also write a page to look at, with a picture of which device holds what")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return out


def main(flags) -> None:
    """Prints the report for the devices that are there, or for as many as --simulate_devices says."""
    config = configured(flags.config, flags.overrides)
    page_file = None if flags.html is None else _writable(flags.html)
    chip = None if flags.target is None else target(flags.target)
    import jax                                 # after the configuration has been read: mistakes in it answer at once

    if chip is not None:
        xla_flags.add(xla_flags.GPU_FLAGS)     # as training on the chip has them
        jax.config.update("jax_platforms", "cpu")
    from jaxlm.job import build_job
    from partitioning import machine_of, page, report, simulated
    number = flags.simulate_devices or jax.device_count()
    machine = chip.machine(number) if chip else simulated(number) if flags.simulate_devices else machine_of(jax.devices())
    job = build_job(config, number, machine)
    if flags.schedule and job.table is None:
        raise DeclarationError("--schedule draws the schedule of a pipeline, but config.mesh.pipe = 1; a pipeline is declared by "
                               "--config.mesh.pipe=4, say.")
    collectives, memory = None, None
    if chip or flags.compile:
        job, collectives, memory = _compiled(job, chip, flags)
    if page_file is not None:
        sections = [] if job.table is None else [schedules.schedule_html(job.table, COSTS[config.pipeline.residuals])]
        title = f"Sharding of {flags.config}"
        page_file.write_text(page.html(job.layout, collectives, memory, title, job.links(), sections), "utf-8")
    if flags.json:
        facts = report.to_json(job.layout, collectives, memory, job.links())
        print(json.dumps(facts | _schedule(job) if flags.schedule else facts))
        return
    print(report.text(job.layout, collectives, memory, job.links()), end="")
    if flags.schedule:
        print("\n" + schedules.schedule_text(job.table, COSTS[config.pipeline.residuals]))


def _schedule(job) -> dict:
    """The schedule in numbers. `live` counts microbatches on each stage; the times are modelled, in forwards of a stage."""
    figures = schedules.measure(job.table, COSTS[job.config.pipeline.residuals])
    return {"schedule": {"name": job.table.name, "microbatches": job.table.num_microbatches, **dataclasses.asdict(figures)}}


def _compiled(job, chip, flags):
    """The job with what the compiler says in its notes; the collectives and the memory of the compiled step, and what would help
    where it does not fit with room to spare."""
    import jax

    from jaxlm import compiled
    from jaxlm.job import build_job
    number = job.layout.num_devices
    devices = chip.devices(number) if chip else jax.devices()[:number]
    kind, capacity = (chip.kind, chip.memory) if chip else (devices[0].device_kind, compiled.capacity_of(devices[0]))
    if devices[0].platform == "cpu":
        _say("warning: compiled for the CPU; on other chips XLA makes other programs, so collectives and temporary bytes differ. "
             f"To compile for GPUs: {' or '.join(f'--target={name}' for name in DEVICES_PER_HOST)}.")
    _say(f"compiling the training step for {number} x {kind}")
    step, notes = compiled.compile_for(job, devices)
    memory = compiled.memory_of(step, kind, capacity)
    if memory.capacity is not None and memory.room < memory.capacity // 10:
        memory = compiled.with_suggestions(
            memory, job, lambda change: build_job(configured(flags.config, [*flags.overrides, *change]), number, job.machine),
            devices, _say)
    layout = dataclasses.replace(job.layout, notes=(*job.layout.notes, *notes))
    return dataclasses.replace(job, layout=layout), compiled.collectives_of(step, job), memory


def _say(line: str) -> None:
    print(f"explain: {line}", file=sys.stderr, flush=True)


def _writable(name: str) -> pathlib.Path:
    """The file behind --html, if it can be one."""
    path = pathlib.Path(name)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"would lie in {path.parent}, which is no folder"
        raise DeclarationError(f"--html={name} {what}; give the name of a file, such as --html=sharding.html.")
    return path


if __name__ == "__main__":
    sys.exit(run(main, arguments()))
