"""The launcher for one machine, with programs that take no time instead of training."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAUNCHER = [sys.executable, str(ROOT / "scripts" / "launch_local.py")]
FACTS = """
import os, sys, time, signal, pathlib
i, n = int(os.environ["JAXLM_PROCESS_ID"]), int(os.environ["JAXLM_NUM_PROCESSES"])
"""


def launch(code, *flags, **more):
    done = subprocess.run([*LAUNCHER, *flags, "--", sys.executable, "-c", FACTS + code], capture_output=True, text=True,
                          timeout=60, env={**os.environ, **more})
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def ends(pid):
    """Whether a process that is nobody's child here ends within some seconds; it may still wait for somebody to ask how."""
    for _ in range(200):
        state = pathlib.Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_every_process_knows_its_place_and_all_know_one_coordinator():
    code = "print(i, n, os.environ['JAXLM_COORDINATOR'], os.environ['JAX_NUM_CPU_DEVICES'])"
    status, out, _ = launch(code, "-n", "3", "--cpu-devices", "2")
    assert status == 0 and sorted(line[:7] for line in out) == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]
    assert len({line.split()[3] for line in out}) == 1 and all(line.endswith(" 2") for line in out)


def test_only_the_first_processs_lines_are_shown_if_that_is_asked():
    assert launch("print('hello from', i)", "-n", "3", "--show=first")[:2] == (0, ["hello from 0"])


@pytest.mark.parametrize("end, status, words", [
    ("sys.exit(2)", 2, "ended with status 2"), ("sys.exit(3)", 3, "ended with status 3"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed by SIGKILL")])
def test_when_one_ends_badly_the_rest_are_killed_and_its_status_is_the_jobs(end, status, words):
    found, _, err = launch(f"if i == 1: {end}\ntime.sleep(1000)", "-n", "3", "--grace=0.5")
    assert found == status
    assert any(f"process 1 {words}; the others have 0.5 s" in line for line in err)
    assert any("process(es) 0, 2 did not end within 0.5 s" in line for line in err)


def test_the_others_may_end_in_their_own_words():
    code = "if i == 1: sys.exit(1)\ntime.sleep(0.3); print('saved'); sys.exit(1)"
    status, out, err = launch(code, "-n", "3", "--grace=30")
    assert status == 1 and sorted(out) == ["[0] saved", "[2] saved"] and not any("killing" in line for line in err)


def test_a_job_is_started_again_on_those_that_are_left_and_fewer_still_where_they_do_not_suit():
    """Four processes lose one; three do not suit the declaration; two finish."""
    code = """
print('of', n, flush=True)
if n == 4 and i == 2: os.kill(os.getpid(), signal.SIGKILL)
if n == 4: time.sleep(1000)
if n == 3: sys.exit(2)
"""
    status, out, err = launch(code, "-n", "4", "--min-processes=2", "--grace=0.3")
    assert status == 0 and "[1] of 2" in out
    assert any("starting again with 3 process(es) from the last checkpoint (restart 1 of 3)" in line for line in err)
    assert any("3 processes do not suit the declaration, for the reason above; trying 2" in line for line in err)


def test_it_says_when_it_cannot_go_on_with_fewer():
    lost = "if n == 4: os.kill(os.getpid(), signal.SIGKILL) if i == 2 else time.sleep(1000)\n"
    status, _, err = launch(lost + "sys.exit(2)", "-n", "4", "--min-processes=3", "--grace=0.3")
    assert status == 2
    assert "cannot go on with 3 process(es), for the reason above, and --min-processes=3 allows no fewer" in err[-1]
    both = "os.kill(os.getpid(), signal.SIGKILL) if i in (1, 2) else time.sleep(1000)"
    status, _, err = launch(both, "-n", "4", "--min-processes=3", "--grace=0.3")
    assert status == 1 and "2 of 4 processes are left, fewer than --min-processes=3" in err[-1]


def test_without_a_smallest_number_all_are_started_again_as_often_as_allowed(tmp_path):
    code = f"pathlib.Path(r'{tmp_path}', f'{{i}}-{{os.getpid()}}').touch(); time.sleep(0.2); sys.exit(1)"
    status, _, err = launch(code, "-n", "2", "--restarts=2", "--grace=5")
    assert status == 1 and len(list(tmp_path.glob("1-*"))) == 3 and "no restart left" in err[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_once_and_nothing_is_started_again(number):
    code = """
def stop(number, frame): os.write(1, b'saving\\n'); os._exit(3)
signal.signal(signal.SIGTERM, stop); print('ready', flush=True); time.sleep(1000)
"""
    process = subprocess.Popen([*LAUNCHER, "-n", "2", "--restarts=5", "--", sys.executable, "-c", FACTS + code], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3 and sorted(out.splitlines()) == ["[0] saving", "[1] saving"] and "starting" not in err


def test_a_launcher_that_is_killed_takes_its_processes_along():
    if sys.platform != "linux":
        pytest.skip("Linux alone can")
    code = FACTS + "print('ready', flush=True); time.sleep(1000)"
    process = subprocess.Popen([*LAUNCHER, "-n", "1", "--", sys.executable, "-c", code], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.readline()
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    process.stdout.close()
    for pid in children:
        assert ends(pid)


@pytest.mark.parametrize("signalled", [False, True])
def test_what_a_command_started_itself_ends_with_it(signalled, tmp_path):
    """The command may be a shell, which dies of a signal and leaves what runs in it."""
    if sys.platform != "linux":
        pytest.skip("looks into /proc")
    (tmp_path / "work.py").write_text(f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(tmp_path)!r}, "told").touch(), sys.exit(3)))
pathlib.Path({str(tmp_path)!r}, "pid").write_text(str(os.getpid()))
time.sleep(1000)
""")
    until_started = f"while [ ! -s {tmp_path / 'pid'} ]; do sleep 0.1; done"
    shell = f"{sys.executable} {tmp_path / 'work.py'} & {'wait' if signalled else until_started}"
    process = subprocess.Popen([*LAUNCHER, "-n", "1", "--grace=2", "--", "bash", "-c", shell], stderr=subprocess.PIPE, text=True)
    if signalled:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert ends((tmp_path / "pid").read_text())
    assert (tmp_path / "told").exists() == signalled
    assert ("what the command started did not end within 2 s; killing" in err) != signalled


def test_gpus_are_shared_out():
    code = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert sorted(launch(code, "-n", "2", "--gpus-per-process=2", CUDA_VISIBLE_DEVICES="4,5,6,7")[1]) == ["[0] 4,5", "[1] 6,7"]


@pytest.mark.parametrize("flags, words", [(["-n", "2"], "which command"), (["-n", "0", "--", "true"], "at least 1"),
                                          (["-n", "2", "--min-processes=3", "--", "true"], "expected 1 to 2"),
                                          (["-n", "1", "--", "no-such-command"], "cannot be started")])
def test_wrong_flags_are_status_2_and_one_message(flags, words):
    done = subprocess.run([*LAUNCHER, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
