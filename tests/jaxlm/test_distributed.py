"""Who belongs to a job: found in the declaration or the environment, never guessed; and two real processes that add."""

import os
import socket
import subprocess
import sys

import pytest

from jaxlm.config import DistributedConfig
from jaxlm.distributed import Group, detect, first_host, initialize
from partitioning.declaration import DeclarationError

LAUNCHER = {"JAXLM_COORDINATOR": "host:1234", "JAXLM_NUM_PROCESSES": "4", "JAXLM_PROCESS_ID": "2"}
SLURM = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
JOBSET = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "JOBSET_NAME": "run",
          "REPLICATED_JOB_NAME": "worker", "JAX_NUM_PROCESSES": "4"}


def test_nothing_said_is_a_process_on_its_own():
    assert detect(DistributedConfig(), {}) is None


def test_the_declaration_alone_is_enough():
    assert detect(DistributedConfig("host:1", 2, 1), {}) == Group("host:1", 2, 1)


def test_the_launchers_variables_are_enough():
    assert detect(DistributedConfig(), LAUNCHER) == Group("host:1234", 4, 2)


def test_the_declaration_wins_fact_by_fact_over_the_environment():
    assert detect(DistributedConfig(coordinator="other:9"), LAUNCHER) == Group("other:9", 4, 2)
    assert detect(DistributedConfig(), LAUNCHER | SLURM) == Group("host:1234", 4, 2)


def test_slurms_step_is_found():
    assert detect(DistributedConfig(), SLURM) == Group("gpu003:61441", 2, 1)


def test_a_batch_script_outside_srun_is_on_its_own():
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert detect(DistributedConfig(), batch) is None


def test_a_step_of_one_task_inside_a_larger_allocation_is_on_its_own():
    assert detect(DistributedConfig(), SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("nodes, host", [
    ("node1", "node1"), ("node1,node2", "node1"), ("gpu[003-010,012]", "gpu003"), ("gpu[7,9],b1", "gpu7"),
    ("r[1-2]n[5-9]", "r1n5"), ("a-b[01-02]-ib,c", "a-b01-ib")])
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("extra, devices", [
    ({}, None),                                                              # one task per node: all of its GPUs
    ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "1"}, (2, 3)),  # eight GPUs for four tasks
    ({"SLURM_STEP_TASKS_PER_NODE": "1,8", "SLURM_LOCALID": "5"}, (5,)),
    ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "1", "SLURM_GPUS_PER_TASK": "2"}, None)])  # Slurm split them
def test_the_gpus_of_a_node_are_shared_out_among_its_tasks(extra, devices):
    environ = SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"} | extra
    assert detect(DistributedConfig(), environ).local_devices == devices


def test_a_pod_of_a_jobset_is_found():
    assert detect(DistributedConfig(), JOBSET) == Group("run-worker-0-0.run:55527", 4, 3)


def test_a_pod_outside_an_indexed_job_is_on_its_own():
    assert detect(DistributedConfig(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


def test_one_process_can_be_declared_where_the_environment_says_more():
    for environ in (LAUNCHER, SLURM, JOBSET):
        assert detect(DistributedConfig(num_processes=1), environ) is None


@pytest.mark.parametrize("config, environ, message", [
    (DistributedConfig(process_id=1), {},
     "coordinator and num_processes are unknown.*process_id = 1.*config.distributed.coordinator"),
    (DistributedConfig(coordinator="h:1", num_processes=2), {}, "process_id is unknown.*JAXLM_PROCESS_ID"),
    (DistributedConfig("h:1", 2, 2), {}, "from 0 to num_processes - 1.*process_id = 2"),
    (DistributedConfig("host", 2, 0), {}, "host:port.*'host'"),
    (DistributedConfig(), {"JAXLM_PROCESS_ID": "one"}, "JAXLM_PROCESS_ID = 'one' is not a whole number"),
    (DistributedConfig(), {k: v for k, v in JOBSET.items() if k != "JAX_NUM_PROCESSES"},
     "num_processes is unknown.*num_processes=1"),
    (DistributedConfig(num_processes=2), {**SLURM, "SLURM_PROCID": "5"}, "process_id = 5 .Slurm's SLURM_PROCID.")])
def test_facts_that_are_missing_or_clash_are_named_with_the_way_out(config, environ, message):
    with pytest.raises(DeclarationError, match=message):
        detect(config, environ)


def test_a_process_on_its_own_leaves_jax_distributed_alone(monkeypatch):
    import jax
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: pytest.fail("called"))
    for name in [*LAUNCHER, *SLURM, *JOBSET, "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"]:
        monkeypatch.delenv(name, raising=False)
    assert initialize(DistributedConfig()) == (0, 1)


TWO_PROCESSES = """
import sys, jax, numpy as np
from jaxlm.config import DistributedConfig
from jaxlm.distributed import initialize
index, count = initialize(DistributedConfig())
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
P = jax.sharding.PartitionSpec
mine = np.full((2, 3), index + 1, np.float32)
whole = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, P("data")), mine)
add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
print("sum", index, count, float(jax.jit(add)(whole).addressable_data(0)[0, 0]))
"""


def test_two_processes_add_their_numbers():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "JAXLM_COORDINATOR": f"127.0.0.1:{port}", "JAXLM_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "2"}
    processes = [subprocess.Popen([sys.executable, "-c", TWO_PROCESSES], env=environ | {"JAXLM_PROCESS_ID": str(index)},
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for index in range(2)]
    try:
        for index, process in enumerate(processes):
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
            assert f"sum {index} 2 6.0" in out               # two devices of 1 and two of 2
    finally:
        for process in processes:
            process.kill()
