"""`python -m jaxlm.train`: trains a model; the same --workdir resumes.

The order matters to the user: everything that can be wrong with the input is found before anything compiles, and
everything that can be prepared while XLA compiles is.
"""

import argparse
import contextlib
import gc
import pathlib
import shlex
import sys
from typing import Any

from jaxlm import commandline, starting_point
from jaxlm.background import in_background
from jaxlm.checkpoints import FORMAT, Checkpoints, saved_steps
from jaxlm.errors import RollBack, RunError, Stopped
from jaxlm.config import Config, to_dict
from jaxlm.peers import Peers
from jaxlm.run_directory import check_name, check_resume, default_workdir, load_saved_config, save_config, sole_writer
from jaxlm.starting_point import StartingPoint
from partitioning.declaration import DeclarationError


def main(flags: argparse.Namespace) -> int:
    workdir, config, changes = settle(flags)
    from jaxlm import distributed, xla_flags
    import jax

    flag_line = xla_flags.apply(jax.config.jax_platforms)
    peers = distributed.join(config.distributed)
    with peers or contextlib.nullcontext():
        remarks = [*(f"changed: {line}" for line in changes), *([flag_line] if flag_line else [])]
        return run(flags, workdir, config, remarks, peers)


def run(flags: argparse.Namespace, workdir: pathlib.Path, config: Config, remarks: list[str], peers: Peers | None) -> int:
    """Trains, as one of the processes of the job."""
    import jax

    if peers is not None and not flags.workdir:
        raise DeclarationError(f"{peers.count} processes need one run directory: pass --workdir=DIR that all can reach.")
    if peers is not None and config.checkpoint.on_save_error == "continue":
        raise DeclarationError(
            "config.checkpoint.on_save_error = 'continue' is for a single process: of several, one that could "
            "not save and the others that could would wait for each other. Set it to 'stop'."
        )
    say = print if jax.process_index() == 0 else (lambda *_: None)

    from jaxlm.data import open_data
    from jaxlm.job import build_job
    from jaxlm.logs.weights_and_biases import check as check_wandb
    from partitioning import machine_of

    check_wandb(config.log.wandb)
    data = open_data(config.data, config.model.vocab_size)
    job = build_job(config, jax.device_count(), machine_of(jax.devices())).on_devices()
    say(f"run directory: {workdir}")
    for line in remarks:
        say(line)
    stop_at = min(config.train.stop_at or config.train.steps, config.train.steps)
    if peers is not None:  # before Orbax opens the folder, at which all processes must be there
        names = ", ".join(saved_steps(workdir)) or "none"
        peers.agree("list of checkpoints", names, config.distributed.start_timeout)
    point = starting_point.find(config, workdir)
    for line in point.notes:
        say(line)
    start = point.step
    if start >= stop_at:
        say(
            f"this run is finished: its newest checkpoint is of step {start}, and it was to end at {stop_at}. To go on, raise "
            f"--config.train.{'steps' if stop_at == config.train.steps else 'stop_at'}."
        )
        return 0
    weights = starting_point.check(point, job, data, flags.allow_change)
    origin, next_batch, lines = starting_point.order(point, data, config)
    order = data.mixture(config.train.global_batch_size, config.data.seed, origin, config.data.epochs)
    batches = order.batches
    if batches is not None and start + batches - next_batch < stop_at:
        stop_at = start + max(batches - next_batch, 0)
        lines.append(f"data: config.data.epochs = {config.data.epochs} ends it at step {stop_at}")
        if stop_at <= start:
            say(f"this run is finished: its data ended at step {start}. To go on, raise --config.data.epochs.")
            return 0
    sample = make_sample(job, data) if config.train.sample_every else None
    for line in [*opening_lines(job, data, start, stop_at, weights), *lines]:
        say(line)
    lock = sole_writer(workdir) if jax.process_index() == 0 else contextlib.nullcontext()
    with lock, out_of_memory_explained(job), stop_with_command(resume_command(flags, workdir)):
        if tuple(saved_steps(workdir)) != point.seen:
            raise DeclarationError(f"another run has just written in {workdir}; run the same command again to go on from there.")
        if jax.process_index() == 0:
            for line in starting_point.set_aside(point, workdir):
                say(line)
        train(job, data, order, workdir, point, stop_at, sample, peers)
    ended = "stopped by config.train.stop_at" if stop_at == config.train.stop_at != config.train.steps else "finished"
    say(f"{ended} at step {stop_at}; to go on or to look again:\n  {resume_command(flags, workdir)}")
    return 0


def settle(flags: argparse.Namespace) -> tuple[pathlib.Path, Config, list[str]]:
    """The run directory, the configuration, and what differs from the one that the run was started with."""
    workdir = pathlib.Path(flags.workdir) if flags.workdir else None
    source = flags.config
    if source is None and workdir is not None and (workdir / "config.json").is_file():
        source = str(workdir / "config.json")
    config = commandline.configured(source, flags.overrides)
    if workdir is None:
        workdir = default_workdir(pathlib.Path(source).stem)
        check_name(workdir)
        return workdir, config, []
    check_name(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise DeclarationError(f"--workdir={workdir} is a file; give a directory.")
    old = load_saved_config(workdir)
    if old is None and saved_steps(workdir):
        raise DeclarationError(
            f"{workdir} has checkpoints but no config.json, so nothing says which model they are of; "
            "put the file back, or use another --workdir."
        )
    return workdir, config, check_resume(workdir, old, config, flags.allow_change) if old else []


@contextlib.contextmanager
def stop_with_command(command: str):
    """Adds to the word that a run has stopped how it is gone on with."""
    try:
        yield
    except Stopped as stop:
        raise Stopped(f"{stop} To go on:\n  {command}") from None


def opening_lines(job: Any, data: Any, start: int, stop_at: int, source: str) -> list[str]:
    """What a run states before it starts."""
    import jax

    from jaxlm.models import count_parameters

    config, layout = job.config, job.layout
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1) or "one device"
    state = sum(row.bytes_per_device for row in layout.rows if row.kind in ("params", "optimizer"))
    device = jax.devices()[0]
    lines = [
        f"devices: {jax.device_count()} x {device.device_kind} ({device.platform}), mesh: {axes}",
        f"model: {count_parameters(job.model.specs):,} parameters, state {state / 2**20:,.1f} MiB per device",
        f"batch: {config.train.global_batch_size} x {config.data.sequence_length} = "
        f"{config.train.global_batch_size * config.data.sequence_length:,} tokens per step, steps {start + 1} to {stop_at}",
        *(f"data: {line}" for line in data.lines()),
        f"weights: {source}",
    ]
    return lines + [f"note: {note}" for note in layout.notes]


def train(
    job: Any,
    data: Any,
    order: Any,
    workdir: pathlib.Path,
    point: StartingPoint,
    stop_at: int,
    sample: Any,
    peers: Peers | None = None,
) -> None:
    """Prepares the step and the state side by side, then loops; again from a checkpoint, as often as bad numbers ask for it."""
    import jax

    from jaxlm import faults
    from jaxlm.replicas import ReplicaCheck
    from jaxlm.signals import StopFlag
    from partitioning import text

    config = job.config
    train_step = in_background(lambda: compile_train_step(job))
    state = starting_point.load(point, job)
    if jax.process_index() == 0:  # after the restore: a run that cannot go on is left as it was
        save_config(workdir, config)
        (workdir / "sharding.txt").write_text(text(job.layout, links=job.links()) + "\n", "utf-8")
    evaluate = make_evaluate_or_none(job, data)
    check_replicas, remarks = None, []
    if config.faults.replica_check_every:
        check_replicas = ReplicaCheck(job.mesh, {name: job.abstract_state()[name] for name in ("params", "optimizer")})
        if not check_replicas.compares:
            remarks.append("note: config.faults.replica_check_every compares nothing: no array is on two devices of this mesh.")
    parts = {"train_step": train_step(), "evaluate": evaluate, "sample": sample, "check_replicas": check_replicas}
    with StopFlag(peers, point.step) as stop:
        while True:
            try:
                return run_from(job, data, order, workdir, state, point.step, stop_at, peers, remarks, **parts, stop=stop)
            except RollBack as error:
                back = error.facts
            # The error is gone here, and with it the state that its frames held.
            state = None
            gc.collect()
            point = starting_point.find(config, workdir, scheduled=True)
            aside = starting_point.set_aside(point, workdir) if jax.process_index() == 0 else []
            if peers is not None:
                name = f"checkpoint to go back to (rollback {back.rollbacks + 1})"
                peers.agree(name, point.words, config.distributed.start_timeout)
            state = job.set_counters(starting_point.load(point, job), faults.after(back, point.step))
            remarks = [
                *point.notes,
                *aside,
                f"{back.words}: back to step {point.step}, and on past the {back.step - point.step} batch(es) since "
                f"(rollback {back.rollbacks + 1} of {config.faults.max_rollbacks})",
            ]


def run_from(
    job: Any,
    data: Any,
    order: Any,
    workdir: pathlib.Path,
    state: Any,
    start: int,
    stop_at: int,
    peers: Peers | None,
    remarks: list[str],
    **parts,
) -> None:
    """Opens the checkpoints, the logs and the feed, and loops with `parts` of `run_loop` from the state of step `start`."""
    import jax

    from jaxlm.data import train_batches
    from jaxlm.data.feed import place, rows_of
    from jaxlm.logs import ProfileWindow, Recorder
    from jaxlm.loop import run_loop

    config, is_main = job.config, jax.process_index() == 0
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint)
    shardings = job.batch_shardings()
    left_out = int(state["counters"]["left_out"])
    last = config.train.steps if order.batches is None else min(config.train.steps, order.batches - left_out)
    stop_at = min(stop_at, last)  # batches that are left out end the data earlier
    batches = train_batches(
        order,
        start_step=start + left_out,
        rows=rows_of(shardings["inputs"], config.train.global_batch_size),
        workers=config.data.workers,
        prefetch=4 if config.data.workers else 0,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(checkpoints.close)
        recorder = stack.enter_context(
            Recorder(workdir, config.log, total_steps=stop_at, start_step=start, is_main=is_main, run_config=to_dict(config))
        )
        for line in remarks:
            recorder.line(line)
        feed = stack.enter_context(place(batches, shardings))
        profile = ProfileWindow.declared(config.log.profile_steps, workdir / "profile")
        stack.callback(profile.close)
        if peers is not None:
            stack.enter_context(peers.ending_is_told())
        run_loop(
            job,
            state=state,
            feed=feed,
            start=start,
            stop_at=stop_at,
            recorder=recorder,
            checkpoints=checkpoints,
            about=lambda step: about(job, data, order, step, left_out),
            shares=lambda step: order.shares(step + left_out),
            last=last,
            profile=profile,
            **parts,
        )


def compile_train_step(job: Any) -> Any:
    """The compiled training step, its state donated. Compiled ahead of time, so there is exactly one.

    Raises:
      DeclarationError: a pipeline's program could wait for ever.
    """
    import jax

    from jaxlm.train_step import make_train_step
    from partitioning import check_compiled

    step = make_train_step(job.config, job.model, job.optimizer, job.layout, job.table)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(job.shardings(), None))
    compiled = jitted.lower(job.abstract_state(), job.abstract_batch()).compile()
    if job.table is not None:
        check_compiled(compiled.as_text(), job.layout.sizes)
    return compiled


def about(job: Any, data: Any, order: Any, step: int, left_out: int) -> dict[str, Any]:
    """What is saved beside the arrays. The data position is the number of batches taken or left out: their order is a function
    of it, and of `order`."""
    from jaxlm.data.continuation import described

    return {
        "format": FORMAT,
        "step": step,
        "config": to_dict(job.config),
        "mesh": dict(job.layout.sizes),
        "data": {
            "next_batch": step + left_out,
            "seed": job.config.data.seed,
            "order": described(order, data, job.config, step + left_out),
            **data.facts,
        },
    }


def make_evaluate_or_none(job: Any, data: Any) -> Any:
    from jaxlm.evaluation import make_evaluate

    return make_evaluate(job, data.eval) if data.eval is not None else None


def make_sample(job: Any, data: Any) -> Any:
    """A function of the parameters that continues config.train.sample_prompt."""
    from jaxlm.prompt import text_prompt
    from jaxlm.sampling import Sampler, generation_layout

    sampler = Sampler(job.model, generation_layout(job))
    prompt, ends = text_prompt(job.config.data, data.tokenizer, job.config.train.sample_prompt)
    if not 0 < len(prompt) < job.config.model.max_positions:
        raise DeclarationError(
            f"config.train.sample_prompt has {len(prompt)} tokens; expected at least 1 and fewer than "
            f"config.model.max_positions = {job.config.model.max_positions}."
        )

    def sample(params) -> str:
        return data.tokenizer.decode(
            list(sampler.generate(params, prompt, max_new_tokens=128, temperature=0.8, seed=0, ends=ends))
        )

    return sample


@contextlib.contextmanager
def out_of_memory_explained(job: Any):
    """Turns XLA's page about memory into what was asked for, by which arrays, and what to change."""
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(w in str(error) for w in ("RESOURCE_EXHAUSTED", "Out of memory")):
            raise
        largest = sorted(job.layout.rows, key=lambda row: -row.bytes_per_device)[:5]
        arrays = "\n".join(f"  {row.kind}/{row.path}: {row.bytes_per_device / 2**20:,.1f} MiB per device" for row in largest)
        raise RunError(
            f"out of memory on a device: {str(error).splitlines()[0][:200]}\nlargest arrays:\n{arrays}\n"
            "Raise config.train.gradient_accumulation, lower config.train.global_batch_size or config.data.sequence_length, "
            "set config.train.remat = 'full', or shard over more devices (config.mesh.fsdp)."
        ) from error


def resume_command(flags: argparse.Namespace, workdir: pathlib.Path) -> str:
    """The command that goes on with this run."""
    words = ["python", "-m", "jaxlm.train"] + ([f"--config={flags.config}"] if flags.config else [])
    words += [f"--config.{key}={text}" for key, text in flags.overrides if key != "train.stop_at"]
    words += [f"--simulate_devices={flags.simulate_devices}"] if flags.simulate_devices else []
    return shlex.join([*words, f"--workdir={workdir}"])


def arguments() -> argparse.ArgumentParser:
    out = commandline.parser("jaxlm.train", "Trains a language model. The same --workdir resumes.")
    out.add_argument("--workdir", metavar="DIR", help="the run directory (default: runs/NAME-TIME)")
    out.add_argument("--allow_change", action="store_true", help="resume although keys that change the result differ")
    return out


if __name__ == "__main__":
    sys.exit(commandline.run(main, arguments()))
