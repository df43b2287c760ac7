"""The mesh: six named axes over the devices, outermost (slowest links) first.

The user gives sizes, one of which may be -1. `resolve_sizes` turns them into six numbers whose product is the number of
devices, once, before anything else happens; the declared sizes are never read again. It needs a number of devices and
not the devices themselves, so a laptop can resolve a mesh of thousands.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partitioning.declaration import DeclarationError, leaf

if TYPE_CHECKING:
    import jax

    from partitioning.machine import Machine

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
NOT_AVAILABLE_YET = {"expert": "expert parallelism is", "context": "context parallelism is"}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. One may be -1: what is left of the devices; `data` is, unless another one is."""
    pipe: int = leaf(1, "pipeline stages", at_least=-1)
    data: int | None = leaf(
        None, "replicas of everything that no other axis shards (None: -1 unless another axis is -1)", at_least=-1)
    fsdp: int = leaf(1, "devices that share parameters and optimizer state and split the batch", at_least=-1)
    expert: int = leaf(1, "devices that share experts", at_least=-1)
    context: int = leaf(1, "devices that share one sequence in attention", at_least=-1)
    tensor: int = leaf(1, "devices that split each matmul", at_least=-1)


def resolve_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """The size of all six axes; their product is `num_devices`.

    Raises:
      DeclarationError: more than one -1, a size of 0, sizes that do not multiply to the number of devices, or an axis
        larger than 1 that nothing serves yet.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    if sizes["data"] is None:
        sizes["data"] = 1 if -1 in sizes.values() else -1
    for axis, size in sizes.items():
        if size == 0 or size < -1:
            raise DeclarationError(f"config.mesh.{axis} = {size}; expected a size of at least 1, or -1 for what is left of "
                                   "the devices.")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise DeclarationError(f"config.mesh: {' and '.join(open_axes)} are -1 (by the configuration, its preset or the command "
                               f"line); only one axis can take what is left of the {num_devices} devices. Give all but one a "
                               f"size, such as config.mesh.{open_axes[0]}=1.")
    given = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % given or (not open_axes and given != num_devices):
        raise DeclarationError(_misfit(sizes, given, num_devices))
    for axis in open_axes:
        sizes[axis] = num_devices // given
    for axis, what in NOT_AVAILABLE_YET.items():
        if sizes[axis] > 1:
            raise DeclarationError(f"config.mesh.{axis} = {sizes[axis]}: {what} not available yet; set {axis} to 1 and give its "
                                   "devices to data, fsdp or tensor.")
    return sizes


def _misfit(sizes: Mapping[str, int], given: int, num_devices: int) -> str:
    """What the sizes ask for, how many devices there are, and every single change that would make them fit."""
    named = {axis: size for axis, size in sizes.items() if size > 1}
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    asked = " x ".join(f"{axis}={size}" for axis, size in named.items()) or "one device"
    found = f"{num_devices} device" + ("" if num_devices == 1 else "s")
    if open_axis:
        product = f" = {given}" if len(named) > 1 else ""
        message = f"config.mesh: {asked}{product} does not divide the {found}, so {open_axis}=-1 has no size."
    else:
        message = (f"config.mesh: {asked} needs {given} device{'' if given == 1 else 's'}, "
                   f"but there {'is' if num_devices == 1 else 'are'} {found}.")
    ways = []
    for axis, size in named.items():
        rest = given // size
        if num_devices % rest:
            continue
        share = num_devices // rest
        if open_axis:
            ways.append(f"{axis} = " + " or ".join(str(d) for d in nearest_divisors(share, size)))
        elif share != size:
            ways.append(f"{axis} = {share}")
    if not open_axis and given < num_devices and num_devices % given == 0:
        ways += [f"{axis} = -1" for axis in ("data", "fsdp") if sizes[axis] == 1]
    if not ways:
        ways.append(f"sizes whose product {'divides' if open_axis else 'is'} {num_devices}")
    return f"{message} What fits: {'; or '.join(ways)}; or {'a multiple of ' if open_axis else ''}{given} devices."


def nearest_divisors(number: int, size: int) -> list[int]:
    """The divisors of `number` next to `size`, the nearer first: one not above it and one not below it."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    around = {max(d for d in divisors if d <= size), min((d for d in divisors if d >= size), default=number)}
    return sorted(around, key=lambda d: (abs(d - size), d))


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None,
              machine: "Machine | None" = None) -> "jax.sharding.Mesh":
    """A mesh with all six axes, of type Auto, over `devices` (all of JAX's by default). Inner axes lie within a host as far as
    they fit, and JAX's own helpers place them by the coordinates of the devices; every process gets the same mesh.

    Args:
      sizes: of all axes.
      devices: to use.
      machine: which devices are one host's; None is what the devices say themselves (`machine_of`). Devices to compile for
        need their target's: `target("h200").machine(512)`.

    Raises:
      DeclarationError: the sizes do not multiply to the number of devices, or the hosts are not alike.
    """
    import jax
    from jax.experimental import mesh_utils

    from partitioning.machine import machine_of
    devices = jax.devices() if devices is None else list(devices)
    needed = math.prod(sizes[axis] for axis in AXES)
    if needed != len(devices):
        raise DeclarationError(_misfit(sizes, needed, len(devices)))
    machine = machine or machine_of(devices)
    if machine.num_devices != needed:
        raise ValueError(f"a machine of {machine.num_devices} devices for a mesh of {needed}.")
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    if machine.num_hosts == 1:
        return jax.make_mesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=types, devices=devices)
    inside, across = zip(*machine.split(sizes).values())
    by_slice = len({getattr(device, "slice_index", None) for device in devices}) == machine.num_hosts
    placed = mesh_utils.create_hybrid_device_mesh(inside, across, devices, process_is_granule=not by_slice)
    return jax.sharding.Mesh(placed, AXES, axis_types=types)
