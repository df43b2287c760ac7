"""Chips to compile for that need not be here: what is known of each, and devices that a program can be compiled for.

    chip = target("h200")
    layout = layout.on(make_mesh(sizes, chip.devices(512), chip.machine(512)))
    compiled = jax.jit(step).lower(...).compile()              # XLA:GPU's own program for 64 hosts of 8

XLA compiles for NVIDIA GPUs on any machine on which JAX's CUDA plugin and the compiler's libraries are installed. No driver
is needed, nothing can be run, and XLA does not choose between kernels by timing them (no autotuning).
"""

import dataclasses
import importlib.util
import pathlib
import re
from typing import Any

from partitioning.declaration import DeclarationError, nearest
from partitioning.machine import Machine

FOLDER = pathlib.Path(__file__).with_name("chips")      # NAME.txtpb: XLA's description of a chip (GpuTargetConfigProto)
DEVICES_PER_HOST = {"a100": 8, "h200": 8}                 # joined by NVLink: NVIDIA's HGX and DGX boards


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip, and how many of them share a host's fast links.

    Attributes:
      name: as users write it, 'h200'.
      kind: JAX's `device_kind`, 'NVIDIA H200'.
      memory: bytes of one device.
      devices_per_host: of a full host; a smaller number of devices is one host.
      description: of the chip, for XLA.
    """
    name: str
    kind: str
    memory: int
    devices_per_host: int
    description: str = dataclasses.field(repr=False)

    def machine(self, number: int) -> Machine:
        """So many of these chips, in hosts.

        Raises:
          DeclarationError: they do not fill hosts.
        """
        size = self.devices_per_host
        if number > size and number % size:
            hosts = number // size
            raise DeclarationError(f"{number} devices do not fill hosts of {size} {self.kind}; what fits: {hosts * size} or "
                                   f"{(hosts + 1) * size} devices, or fewer than {size} on one host.")
        return Machine(number, min(number, size), "NVLink", "network")

    def devices(self, number: int) -> list[Any]:
        """Devices to compile for, host by host.

        Raises:
          DeclarationError: they do not fill hosts, or what compiling needs is not installed.
        """
        machine = self.machine(number)
        _check_installed(self)
        from jax.experimental import topologies
        shape = f"1x{machine.num_hosts}x{machine.devices_per_host}"
        return topologies.get_topology_desc(platform="cuda", target_config=self.description, topology=shape).devices


def target(name: str) -> Target:
    """The chip of that name.

    Raises:
      DeclarationError: there is none.
    """
    if name not in DEVICES_PER_HOST:
        raise DeclarationError(f"no target {name!r}; {nearest(name, DEVICES_PER_HOST, 'target')}")
    description = (FOLDER / f"{name}.txtpb").read_text("utf-8")

    def fact(pattern: str) -> str:
        return re.search(pattern, description)[1]
    return Target(name, fact(r'device_description_str: "(.*)"'), int(fact(r"device_memory_size: (\d+)")), DEVICES_PER_HOST[name],
                  description)


def _check_installed(chip: Target) -> None:
    """The plugin without which JAX knows no platform 'cuda'."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12)):
        raise DeclarationError(f"compiling for {chip.kind} needs XLA's CUDA compiler (and no GPU): "
                               "pip install -c requirements.lock -e '.[compile]' in the repository.")
