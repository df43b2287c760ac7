#!/usr/bin/env python3
"""Starts several processes of one job on this machine, watches them, and starts them again when one is lost.

    python scripts/launch_local.py -n 4 --cpu-devices 1 -- python -m jaxlm.train --config=shakespeare --workdir=runs/four

Each process gets JAXLM_COORDINATOR, JAXLM_NUM_PROCESSES and JAXLM_PROCESS_ID. Its lines are shown with its number in front.
When one process ends, the others have --grace seconds to end as well, and are killed then. SIGTERM and Ctrl-C are handed on to
all of them, as SIGTERM. The exit status is that of the process that ended first with another status than 0 (1 if a signal
killed it).

With --restarts the job is started again after a loss, and goes on from its last checkpoint: with as many processes, or with
those that are left, if --min-processes allows so few. Where the declaration does not fit so many (exit status 2), the next
smaller number is tried. Python's standard library alone; docs/processes.md has more.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

FINISHED, WRONG_INPUT, STOPPED = 0, 2, 3       # exit statuses after which nothing is started again
_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None) if _LINUX else None


def _die_with_the_launcher() -> None:
    """In the child: Linux kills it when the launcher dies, however that happens."""
    if _libc is not None:
        _libc.prctl(1, signal.SIGKILL)         # PR_SET_PDEATHSIG


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def words(code: int) -> str:
    """'was killed by SIGKILL' or 'ended with status 2'."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


@dataclasses.dataclass
class End:
    """How an attempt ended. `cause` is the process that ended first with another status than 0, None if all finished."""
    codes: list[int]
    cause: int | None
    lost: tuple[int, ...]

    @property
    def status(self) -> int:
        code = 0 if self.cause is None else self.codes[self.cause]
        return 1 if code < 0 else code


class Launcher:
    """Runs one command in several processes, again and again if it must."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.asked_to_stop = False
        self.processes: list[subprocess.Popen] = []
        self._printing = threading.Lock()

    def say(self, text: str) -> None:
        with self._printing:
            print(f"launch: {text}", file=sys.stderr, flush=True)

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hand_on)
        count, restarts = self.flags.processes, 0
        while True:
            end = self.attempt(count)
            if end.cause is None:
                return FINISHED
            self.say("; ".join(f"process {i} {words(code)}" for i, code in enumerate(end.codes)))
            if self.asked_to_stop or end.status in (FINISHED, STOPPED):
                return end.status
            if end.status == WRONG_INPUT:
                smaller = count - 1
                if restarts == 0 or smaller < self.least():
                    if restarts:
                        self.say(f"the job cannot go on with {count} process(es), for the reason above, and "
                                 f"--min-processes={self.least()} allows no fewer")
                    return WRONG_INPUT
                self.say(f"{count} processes do not suit the declaration, for the reason above; trying {smaller}")
                count = smaller
                continue
            if restarts == self.flags.restarts:
                if restarts:
                    self.say(f"no restart left (--restarts={restarts})")
                return end.status
            if self.flags.min_processes is not None:
                left = count - len(end.lost)
                if left < self.flags.min_processes:
                    self.say(f"{left} of {count} processes are left, fewer than --min-processes={self.flags.min_processes}")
                    return end.status
                count = left
            restarts += 1
            self.say(f"starting again with {count} process(es) from the last checkpoint (restart {restarts} of "
                     f"{self.flags.restarts})")

    def least(self) -> int:
        return self.flags.min_processes or self.flags.processes

    def attempt(self, count: int) -> End:
        """Starts the command in `count` processes and returns when all have ended."""
        coordinator, ended = f"localhost:{free_port()}", queue.SimpleQueue()
        self.processes, pumps = [], []
        for index in range(count):
            process = subprocess.Popen(
                self.flags.command, env=self.environment(index, count, coordinator), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
                preexec_fn=_die_with_the_launcher)
            self.processes.append(process)
            self.say(f"process {index} has pid {process.pid}")
            pumps += [threading.Thread(target=self.pump, args=(index, *pipe), daemon=True)
                      for pipe in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))]
            pumps.append(threading.Thread(target=lambda i=index, p=process: ended.put((i, p.wait())), daemon=True))
        for thread in pumps:
            thread.start()
        if self.asked_to_stop:                 # it came while they were being started
            self._send(signal.SIGTERM)
        codes: dict[int, int] = {}
        killed_by_us: set[int] = set()
        cause, deadline = None, None
        while len(codes) < count:
            try:
                index, code = ended.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
            except queue.Empty:
                slow = [i for i in range(count) if i not in codes]
                self.say(f"process(es) {', '.join(map(str, slow))} did not end within {self.flags.grace:g} s; killing")
                killed_by_us.update(slow)
                self._send(signal.SIGKILL)
                deadline = None
                continue
            codes[index] = code
            if cause is None and code != 0:
                cause = index
                if len(codes) < count:
                    self.say(f"process {index} {words(code)}; the others have {self.flags.grace:g} s to end")
            if deadline is None and not killed_by_us:
                deadline = time.monotonic() + self.flags.grace
        self._wait_for_groups()
        for thread in pumps:
            thread.join(timeout=5)
        # Those that a signal from elsewhere took: a process that JAX ends because of another aborts, and is still there to use.
        lost = {i for i, code in codes.items() if code < 0 and code != -signal.SIGABRT and i not in killed_by_us}
        return End([codes[i] for i in range(count)], cause, tuple(sorted(lost or ({cause} - {None}))))

    def environment(self, index: int, count: int, coordinator: str) -> dict[str, str]:
        out = {**os.environ, "JAXLM_COORDINATOR": coordinator, "JAXLM_NUM_PROCESSES": str(count),
               "JAXLM_PROCESS_ID": str(index), "PYTHONUNBUFFERED": "1"}
        if self.flags.cpu_devices:
            out |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.flags.cpu_devices)}
        if self.flags.gpus_per_process:
            share = self.flags.gpus_per_process
            visible = out.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(share * self.flags.processes)))
            out["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[index * share:(index + 1) * share])
        return out

    def pump(self, index: int, source, sink) -> None:
        """Shows the lines of one process."""
        for line in source:
            if index == 0 or self.flags.show == "all":
                with self._printing:
                    sink.write(f"[{index}] {line}" if self.flags.show == "all" else line)
                    sink.flush()

    def _hand_on(self, number, frame) -> None:
        del number, frame
        self.asked_to_stop = True
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> bool:
        """Signals every process and what it has started itself (the command may be a shell). Whether there was one."""
        found = False
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):        # macOS says the latter of one that has ended
                os.killpg(process.pid, number)           # each leads a group of its own
                found = True
        return found

    def _wait_for_groups(self) -> None:
        """What the commands have started may outlive them: it has as long to end as a process has."""
        deadline = time.monotonic() + self.flags.grace
        while self._send(0):
            if time.monotonic() > deadline:
                self.say(f"what the command started did not end within {self.flags.grace:g} s; killing")
                self._send(signal.SIGKILL)
                return
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("--min-processes", type=int, metavar="M",
                        help="start again on those that are left, as long as they are M (default: always on N)")
    parser.add_argument("--restarts", type=int, default=None, metavar="R",
                        help="how often to start again (default: 3 with --min-processes, else 0)")
    parser.add_argument("--grace", type=float, default=15, metavar="SECONDS",
                        help="how long the others may take to end once one has (default 15)")
    parser.add_argument("--cpu-devices", type=int, metavar="K", help="simulated CPU devices of each process")
    parser.add_argument("--gpus-per-process", type=int, metavar="K", help="share out the visible GPUs, K to each process")
    parser.add_argument("--show", choices=("all", "first"), default="all",
                        help="all: every process's lines with its number in front; first: those of process 0 as they are")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    flags = parser.parse_args()
    flags.command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    if not flags.command:
        parser.error("which command? Write it after --, e.g. -- python -m jaxlm.train --config=shakespeare --workdir=runs/a")
    if flags.processes < 1:
        parser.error(f"-n {flags.processes}: expected at least 1")
    if flags.min_processes is not None and not 1 <= flags.min_processes <= flags.processes:
        parser.error(f"--min-processes={flags.min_processes}: expected 1 to {flags.processes}")
    if flags.restarts is None:
        flags.restarts = 3 if flags.min_processes is not None else 0
    try:
        return Launcher(flags).run()
    except OSError as error:
        print(f"launch: {flags.command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())
