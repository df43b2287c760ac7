"""The script that kills runs at random moments, with few kills and fixed seeds; the full figures come from running it."""

import subprocess
import sys

import pytest

from tests.system.commands import ROOT, environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("processes, kills, seed", [(1, 5, 1), (2, 2, 5)])
def test_runs_that_are_killed_and_resumed_end_with_the_bits_of_one_that_was_not(processes, kills, seed):
    done = subprocess.run(
        [sys.executable, "scripts/fault_injection.py", f"--kills={kills}", f"--kills-per-run={kills}", f"--seed={seed}",
         f"--processes={processes}", "--steps=60"], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills of 1 runs" in done.stdout and "1 of 1 ends equal to the bit" in done.stdout
