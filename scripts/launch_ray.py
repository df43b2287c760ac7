#!/usr/bin/env python3
"""Starts a job on the nodes of a Ray cluster, one process per node, and again when one is lost.

    python scripts/launch_ray.py --nodes 4 --gpus-per-node 8 --min-nodes 2 -- \\
        python -m jaxlm.train --config=llama3_8b --config.mesh.fsdp=-1 --workdir=SHARED/run

Not run here: no cluster was at hand.

Each process gets JAXLM_COORDINATOR, JAXLM_NUM_PROCESSES and JAXLM_PROCESS_ID, as from `scripts/launch_local.py`. Needs Ray on
this machine and the same code, environment and --workdir on every node.
"""

import argparse
import os
import subprocess
import sys


class Process:
    """An actor on one node: the address of that node, and the command run there."""

    def address(self) -> str:
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, command: list[str], facts: dict[str, str]) -> int:
        return subprocess.run(command, env={**os.environ, **facts, "PYTHONUNBUFFERED": "1"}).returncode


def attempt(command: list[str], nodes: int, gpus: int, patience: float) -> int | None:
    """Exit status of the job on so many nodes (None: a node was lost). Raises TimeoutError if there are not so many."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1, "GPU": gpus}] * nodes, strategy="STRICT_SPREAD")
    actors: list = []
    try:
        if not group.wait(patience):
            raise TimeoutError
        places = [PlacementGroupSchedulingStrategy(group, i) for i in range(nodes)]
        actors = [ray.remote(Process).options(num_gpus=gpus, scheduling_strategy=place).remote() for place in places]
        coordinator = ray.get(actors[0].address.remote())
        running = [actor.run.remote(command, {"JAXLM_COORDINATOR": coordinator, "JAXLM_NUM_PROCESSES": str(nodes),
                                              "JAXLM_PROCESS_ID": str(i)}) for i, actor in enumerate(actors)]
        while running:
            done, running = ray.wait(running)
            status = ray.get(done[0])
            if status:
                return status
        return 0
    except ray.exceptions.RayActorError:
        return None
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="how many nodes, one process on each")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--min-nodes", type=int, help="go on with so few when nodes are lost (default: always --nodes)")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--patience", type=float, default=300, metavar="SECONDS", help="how long to wait for the nodes")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    flags = parser.parse_args()
    command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    if not command:
        parser.error("which command? Write it after --")
    import ray

    ray.init(address="auto")
    nodes, least, restarts = flags.nodes, flags.min_nodes or flags.nodes, 0
    while True:
        try:
            status = attempt(command, nodes, flags.gpus_per_node, flags.patience)
        except TimeoutError:
            if nodes == least:
                print(f"launch: {nodes} nodes are not to be had", file=sys.stderr)
                return 1
            nodes -= 1
            continue
        if status in (0, 3) or (status == 2 and (not restarts or nodes == least)) or (status != 2 and restarts == flags.restarts):
            return 1 if status is None else status
        if status == 2:                        # so many nodes do not suit the declaration
            nodes -= 1
        else:
            restarts += 1
        print(f"launch: {'a node was lost' if status is None else f'status {status}'}; starting again with up to {nodes} nodes "
              f"from the last checkpoint (restart {restarts} of {flags.restarts})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
