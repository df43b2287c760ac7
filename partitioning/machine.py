"""The machine: which devices share fast links, and which axes of a mesh stay among those.

A host here is whatever its devices' fast links join: the GPUs of a server (or of a rack, where NVLink reaches that far), a TPU
slice. The innermost axes fill a host first, so that the axes that talk most use the fastest links:

    machine = Machine(64, 8, "NVLink", "network")
    machine.split(sizes(data=2, fsdp=4, tensor=8))       # tensor=8 inside; data=2 and fsdp=4 across 8 hosts
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from partitioning.declaration import DeclarationError
from partitioning.mesh import AXES


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices in hosts of equal size.

    Attributes:
      num_devices: in all.
      devices_per_host: that fast links join.
      inside: those links, in words.
      across: the links between hosts, in words.
      host: what such a group of devices is called.
    """
    num_devices: int
    devices_per_host: int
    inside: str = "fast links"
    across: str = "network"
    host: str = "host"

    def __post_init__(self):
        if self.devices_per_host < 1 or self.num_devices % self.devices_per_host:
            raise ValueError(f"{self.num_devices} devices do not fill hosts of {self.devices_per_host}.")

    @property
    def num_hosts(self) -> int:
        """Hosts in all."""
        return self.num_devices // self.devices_per_host

    def split(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """(size inside a host, size across hosts) of every axis; their product is the axis's size. The last axes of AXES come
        inside first."""
        room, parts = self.devices_per_host, {}
        for axis in reversed(AXES):
            inside = math.gcd(sizes[axis], room)
            parts[axis] = inside, sizes[axis] // inside
            room //= inside
        return {axis: parts[axis] for axis in AXES}


def simulated(num_devices: int) -> Machine:
    """Devices of one process that all share its memory."""
    return Machine(num_devices, num_devices, "simulated devices of one process")


def machine_of(devices: Sequence[Any]) -> Machine:
    """What JAX tells of devices that are here: they are of one host if they have the same `slice_index`, or where the platform
    has none, if they belong to the same process. (Of devices to compile for it tells too little; `Target.machine` knows.)

    Raises:
      DeclarationError: the hosts have different numbers of them.
    """
    counts = Counter(map(_host_of, devices))
    if len(set(counts.values())) > 1:
        few, many = min(counts.values()), max(counts.values())
        raise DeclarationError(f"the hosts have different numbers of devices, from {few} to {many}; a mesh needs the same on "
                               "each. Start the job on like hosts, or show each process as many (CUDA_VISIBLE_DEVICES).")
    inside, across, host = {"gpu": ("NVLink or PCIe", "network", "host"), "tpu": ("ICI", "network", "slice")}.get(
        devices[0].platform, ("shared memory", "network", "process"))
    if devices[0].platform == "cpu" and len({device.process_index for device in devices}) == 1:
        return simulated(len(devices))
    return Machine(len(devices), len(devices) // len(counts), inside, across, host)


def _host_of(device: Any) -> int:
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def links(sizes: Mapping[str, int], machine: Machine) -> dict[str, str]:
    """What connects the devices along each axis that is larger than 1, in words."""
    parts, words = machine.split(sizes), {}
    for axis, (inside, across) in parts.items():
        if inside * across == 1:
            continue
        within = f"{machine.inside}, within a {machine.host}" if machine.num_hosts > 1 else machine.inside
        between = f"{machine.across}, across {across} {machine.host}s"
        both = f"{within} ({inside} of {inside * across}); {between}"
        words[axis] = within if across == 1 else between if inside == 1 else both
    return words


def notes(sizes: Mapping[str, int], machine: Machine) -> list[str]:
    """What a user should know of axes that lie across hosts although the axes around them lie within."""
    parts, found = machine.split(sizes), []
    for number, axis in enumerate(AXES):
        outer = [other for other in AXES[:number] if parts[other][0] > 1]
        if parts[axis][1] > 1 and outer:
            fits = ", ".join(str(size) for size in range(1, machine.devices_per_host + 1) if machine.devices_per_host % size == 0)
            found.append(f"config.mesh.{axis} = {sizes[axis]} crosses {machine.host}s, for it does not divide their "
                         f"{machine.devices_per_host} devices, and {' and '.join(outer)} has the links within. "
                         f"Sizes that do: {fits}.")
    return found


def check_within_host(axes: Sequence[str], sizes: Mapping[str, int], machine: Machine) -> None:
    """Refuses a mesh of which one of these axes would cross hosts.

    Raises:
      DeclarationError: with the sizes that stay inside.
    """
    for axis in axes:
        inside, across = machine.split(sizes)[axis]
        if across == 1:
            continue
        inner = [other for other in AXES[AXES.index(axis) + 1:] if sizes[other] > 1]
        room = machine.devices_per_host // math.gcd(math.prod(sizes[other] for other in inner), machine.devices_per_host)
        taken = f", of which {' x '.join(f'{other}={sizes[other]}' for other in inner)} comes first" if inner else ""
        fits = [str(size) for size in range(1, room + 1) if room % size == 0]
        raise DeclarationError(
            f"config.sharding.within_host has {axis}, but {axis}={sizes[axis]} crosses {machine.host}s: a {machine.host} has "
            f"{machine.devices_per_host} devices{taken}. Sizes that stay inside: {', '.join(fits)}; or take {axis} out of "
            "within_host.")
