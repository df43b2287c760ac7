"""Runs the project's commands as a user does: in a process of their own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
TINY = ROOT / "tests" / "system" / "tiny.py"


def environment(**more: str) -> dict[str, str]:
    """One device unless a command simulates more; the compile cache and XLA's flags are those of the tests."""
    given = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    return given | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more


def start(command: str, *arguments, cwd=None, **more: str) -> subprocess.Popen:
    """Starts `python -m jaxlm.COMMAND ARGUMENTS`."""
    return subprocess.Popen([sys.executable, "-m", f"jaxlm.{command}", *map(str, arguments)], cwd=cwd, env=environment(**more),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(command: str, *arguments, status: int = 0, cwd=None, **more: str) -> str:
    """Runs `python -m jaxlm.COMMAND ARGUMENTS`, checks its exit status, and returns stdout and stderr together."""
    process = start(command, *arguments, cwd=cwd, **more)
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, f"exit status {process.returncode}, expected {status}\n{out}\n{err}"
    if status:
        assert "Traceback" not in err, err
    return out + err
