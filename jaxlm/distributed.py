"""Several processes as one program: who coordinates, how many there are, which one this is.

The three facts are looked up one by one, and the first place that knows one wins:

    1. the declaration        config.distributed.coordinator, num_processes, process_id
    2. a launcher of ours     JAXLM_COORDINATOR, JAXLM_NUM_PROCESSES, JAXLM_PROCESS_ID
    3. JAX's names            JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID (operators and launch scripts set them)
    4. Slurm                  srun's variables of the job step
    5. Kubernetes             JOB_COMPLETION_INDEX of an indexed Job; JOBSET_NAME and REPLICATED_JOB_NAME for JobSet's host names

If no place knows anything, or the number is 1, this is an ordinary single process and `jax.distributed` is left alone. A part
of the facts without the rest is an error, since N processes that each believe to be alone would write over one another.
"""

import dataclasses
import os
import re
from collections.abc import Mapping

from jaxlm.errors import RunError
from jaxlm.config import DistributedConfig
from jaxlm.peers import Peers
from partitioning.declaration import DeclarationError

_KUBERNETES_PORT = 55527                      # any free port that all agree on; JAX's own choice there


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a job. `local_devices` are the GPUs of this one (None: all that it sees)."""
    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None


def detect(config: DistributedConfig, environ: Mapping[str, str]) -> Group | None:
    """The group that this process belongs to, or None when it is alone. Pure: reads its arguments only.

    Raises:
      DeclarationError: some of the facts are known and others are not, or they do not fit each other.
    """
    known: dict[str, tuple] = {}               # fact -> (value, where it was found)
    for source in (_declared(config), _variables("JAXLM_COORDINATOR", "JAXLM_NUM_PROCESSES", "JAXLM_PROCESS_ID", environ),
                   _variables("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", environ),
                   _slurm(environ), _kubernetes(environ)):
        for fact, found in source.items():
            known.setdefault(fact, found)
    if not known or known.get("num_processes", (None,))[0] == 1:
        return None
    found = ", ".join(f"{fact} = {value!r} ({where})" for fact, (value, where) in known.items())
    missing = [fact for fact in ("coordinator", "num_processes", "process_id") if fact not in known]
    if missing:
        raise DeclarationError(
            f"of several processes {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} unknown; found {found}. "
            f"Set {' and '.join(f'config.distributed.{fact} (or JAXLM_{fact.upper()})' for fact in missing)}, "
            "or config.distributed.num_processes=1 for a process on its own.")
    coordinator, num_processes, process_id = (known[fact][0] for fact in ("coordinator", "num_processes", "process_id"))
    if not 0 <= process_id < num_processes:
        raise DeclarationError(f"process_id must be from 0 to num_processes - 1; found {found}.")
    if not re.fullmatch(r".+:\d+", coordinator):
        raise DeclarationError(f"the coordinator must be host:port, the address of process 0; found {found}.")
    return Group(coordinator, num_processes, process_id, _local_devices(environ) if "Slurm" in known["process_id"][1] else None)


def join(config: DistributedConfig) -> Peers | None:
    """`initialize`, and the others of the group to end together with; None for a process on its own."""
    index, count = initialize(config)
    if count == 1:
        return None
    from jax._src.distributed import global_state          # there is no public way to its client

    return Peers(global_state.client, index, count)


def initialize(config: DistributedConfig) -> tuple[int, int]:
    """Joins the group, if there is one. Must come before anything asks JAX for devices.

    On CPUs, JAX then sends collectives through gloo, its default.

    Returns:
      (index of this process, number of processes).

    Raises:
      DeclarationError: see `detect`.
      RunError: the others could not be reached.
    """
    group = detect(config, os.environ)
    if group is None:
        return 0, 1
    import jax

    # JAX would take SIGTERM for itself from here on, and tell nobody who does not ask it. Ours is heard: `signals.py`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        # 'deactivate': JAX's own detection would take one GPU per process under Slurm, whatever the job asked for.
        jax.distributed.initialize(group.coordinator, group.num_processes, group.process_id, group.local_devices,
                                   cluster_detection_method="deactivate", initialization_timeout=config.start_timeout,
                                   heartbeat_timeout_seconds=config.heartbeat_timeout)
    except RuntimeError as error:
        role = "open the port of" if group.process_id == 0 else "reach"
        raise RunError(f"process {group.process_id} of {group.num_processes} could not {role} the coordinator "
                       f"{group.coordinator}, or not all processes came: {error}") from error
    return group.process_id, group.num_processes


def _declared(config: DistributedConfig) -> dict[str, tuple]:
    facts = ("coordinator", "num_processes", "process_id")
    return {fact: (getattr(config, fact), f"config.distributed.{fact}") for fact in facts if getattr(config, fact) is not None}


def _variables(coordinator: str, num_processes: str, process_id: str, environ: Mapping[str, str]) -> dict[str, tuple]:
    """The facts that these variables hold; an empty variable is as good as none."""
    out = {}
    if environ.get(coordinator):
        out["coordinator"] = (environ[coordinator], coordinator)
    for fact, name in (("num_processes", num_processes), ("process_id", process_id)):
        if environ.get(name):
            out[fact] = (_integer(name, environ), name)
    return out


def _integer(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise DeclarationError(f"the variable {name} = {environ[name]!r} is not a whole number.") from None


def _slurm(environ: Mapping[str, str]) -> dict[str, tuple]:
    """A task of a job step started by srun. Outside srun (in the batch script itself) these variables are not all there."""
    count = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if not all(environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", count, "SLURM_PROCID")):
        return {}
    port = 61440 + _integer("SLURM_JOB_ID", environ) % 4096        # jobs that share a node rarely share a port
    host = first_host(environ["SLURM_STEP_NODELIST"])
    return {"coordinator": (f"{host}:{port}", "Slurm's SLURM_STEP_NODELIST"),
            "num_processes": (_integer(count, environ), f"Slurm's {count}"),
            "process_id": (_integer("SLURM_PROCID", environ), "Slurm's SLURM_PROCID")}


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: 'a7,b[1-2]' -> 'a7', 'gpu[003-010,012]' -> 'gpu003', 'r[1-2]n[5-9]' -> 'r1n5'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes).group()
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _local_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Splits the visible GPUs of a node among its Slurm tasks; None where Slurm has bound them to tasks, or there is one task."""
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node) for _ in range(int(times or 1))]
    node, visible = int(environ.get("SLURM_NODEID") or 0), environ.get("CUDA_VISIBLE_DEVICES")
    tasks = counts[node] if node < len(counts) else 1
    bound = environ.get("SLURM_GPUS_PER_TASK") or environ.get("SLURM_TRES_PER_TASK")
    if tasks == 1 or bound or not visible or not environ.get("SLURM_LOCALID"):
        return None
    share = len(visible.split(",")) // tasks
    local = int(environ["SLURM_LOCALID"])
    return tuple(range(local * share, (local + 1) * share)) or None


def _kubernetes(environ: Mapping[str, str]) -> dict[str, tuple]:
    """A pod of an indexed Job. Kubernetes tells a pod its index, but not how many there are: the pod's template must."""
    if not environ.get("KUBERNETES_SERVICE_HOST") or not environ.get("JOB_COMPLETION_INDEX"):
        return {}
    out = {"process_id": (_integer("JOB_COMPLETION_INDEX", environ), "Kubernetes' JOB_COMPLETION_INDEX")}
    jobset, job = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    if jobset and job:                         # JobSet gives pods the host names JOBSET-JOB-JOBINDEX-PODINDEX.JOBSET
        out["coordinator"] = (f"{jobset}-{job}-0-0.{jobset}:{_KUBERNETES_PORT}", "Kubernetes' JOBSET_NAME")
    return out
