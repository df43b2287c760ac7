"""What a compiled training step tells: the collectives of one step, the memory that it needs, and what would need less."""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxlm.config import Config
from jaxlm.job import Job
from jaxlm.train import compile_train_step
from partitioning import Memory, group, read_collectives
from partitioning.declaration import DeclarationError

Override = tuple[str, str]     # a dotted key below config and its value's text, as on the command line


def compile_for(job: Job, devices: Sequence[Any]) -> tuple[Any, list[str]]:
    """The job's training step compiled for devices, which may be a target's that are not here; and what the partitioner had to
    say, as notes."""
    job = job.on_devices(devices)
    with printed_by_xla() as printed, jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh):     # tells kernels which chip it is
        step = compile_train_step(job)
    return step, rematerialised("".join(printed))


@contextlib.contextmanager
def printed_by_xla() -> Iterator[list[str]]:
    """Meanwhile, what XLA prints on the stream behind sys.stderr goes into the list that this gives; in an error it is shown.

    XLA has nothing to say of a program from the compilation cache, which is therefore left alone.
    """
    found: list[str] = []
    cache = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryFile() as printed:
        stream = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            yield found
        except BaseException:
            printed.seek(0)
            os.write(stream, printed.read())
            raise
        finally:
            os.dup2(stream, 2)
            os.close(stream)
            jax.config.update("jax_enable_compilation_cache", cache)
        printed.seek(0)
        found.append(printed.read().decode("utf-8", "replace"))


def rematerialised(printed: str) -> list[str]:
    """One note for each array that the partitioner, by what it printed, replicates for want of a better way."""
    warning = r"Involuntary full rematerialization.*?HLO operation %\S+ = (\w+\[[\d,]*\])(?:.*op_name=\"([^\"]*)\")?"
    return [f"the partitioner gathers {shape} whole{f' in {place}' if place else ''}, as it finds no better way from one layout "
            "to the next (an involuntary rematerialisation): split one dim of it by the same axes everywhere."
            for shape, place in dict.fromkeys(re.findall(warning, printed))]


def collectives_of(compiled: Any, job: Job) -> list[dict[str, Any]]:
    """The collectives of one step as `partitioning.group` gives them."""
    return group(read_collectives(compiled.as_text(), job.layout.sizes))


def memory_of(compiled: Any, kind: str, capacity: int | None) -> Memory:
    """What one device needs, as the compiler says.

    Args:
      compiled: the training step.
      kind: of the device.
      capacity: bytes that one device has, None where that is not known.
    """
    sizes = compiled.memory_analysis()
    return Memory(kind, sizes.argument_size_in_bytes, sizes.temp_size_in_bytes,
                  sizes.output_size_in_bytes - sizes.alias_size_in_bytes, capacity)


def capacity_of(device: Any) -> int | None:
    """Bytes that JAX may use of a device that is here; None where the backend does not say (the CPU)."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return (device.memory_stats() or {}).get("bytes_limit")


def changes(config: Config, sizes: dict[str, int]) -> Iterator[tuple[Override, ...]]:
    """Declarations that may lower the memory of a step and leave its result as it is, for `config` on a mesh of `sizes`."""
    batch_shards = sizes["data"] * sizes["fsdp"]
    microbatch = config.train.global_batch_size // config.train.gradient_accumulation
    if config.train.remat != ("full",):
        yield (("train.remat", "full"),)
    if microbatch % (2 * batch_shards) == 0:
        yield (("train.gradient_accumulation", str(2 * config.train.gradient_accumulation)),)
    if config.sharding.zero < 3 and sizes["fsdp"] > 1:
        yield (("sharding.zero", "3"),)
    if sizes["data"] > 1:
        stage = [] if config.sharding.zero == 3 else [("sharding.zero", "3")]
        yield (("mesh.data", "1"), ("mesh.fsdp", str(batch_shards)), *stage)
    if sizes["tensor"] > 1 and config.data.sequence_length % sizes["tensor"] == 0:
        yield (("sharding.activations.rules.stream_length", "tensor"),)


def with_suggestions(memory: Memory, job: Job, rebuild: Callable[[Sequence[Override]], Job], devices: Sequence[Any],
                     say: Callable[[str], None]) -> Memory:
    """The memory with what each change that may lower it comes to, compiled one by one, and then those that help together.

    Args:
      memory: of the job's step.
      job: as declared.
      rebuild: makes the job with some overrides more.
      devices: to compile for.
      say: is told what is being compiled.
    """
    found: dict[tuple[Override, ...], int] = {}

    def needed(change: tuple[Override, ...]) -> None:
        say(f"compiling with {words(change)}")
        with contextlib.suppress(DeclarationError):                        # a change that does not suit this configuration
            found[change] = memory_of(compile_for(rebuild(change), devices)[0], memory.platform, memory.capacity).needed

    for change in changes(job.config, job.layout.sizes):
        if words(change) not in map(words, found):
            needed(change)
    helping = sorted((change for change in found if found[change] < memory.needed), key=found.get)
    if len(helping) > 1 and (memory.capacity is None or found[helping[0]] > memory.capacity):
        needed(tuple(override for change in helping for override in change))
    return dataclasses.replace(memory, suggestions=tuple((words(change), size) for change, size in found.items()))


def words(change: Sequence[Override]) -> str:
    """A change as it is written on the command line."""
    return " ".join(f"--config.{key}={value}" for key, value in change)
