"""The scripts' set-up, with stand-ins for Python, pip and nvidia-smi: what it looks for, when it installs, what it says."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


class House:
    """A copy of the set-up in a folder with a space in its name, and a PATH with nothing but what a test puts there."""

    def __init__(self, folder):
        self.root, self.bin, self.log = folder / "a house", folder / "bin", folder / "pip.log"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "requirements.lock", "scripts/setup.sh"):
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        for tool in ("cat", "cksum", "sort", "paste", "rm", "dirname", "mkdir", "cp", "chmod"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.environ = {"PATH": str(self.bin), "HOME": str(folder)}

    def python(self, path, suits=True):
        """A stand-in for Python: notes each installation, and makes .venv by copying itself."""
        executable(path, f"""
            case "$*" in
              -c*) exit {0 if suits else 1} ;;
              -V) echo Python 3.12 ;;
              "-m venv"*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
              "-m pip install"*) echo "${{@: -1}}" >>'{self.log}' ;;
            esac""")

    def run(self, command):
        return subprocess.run(["/bin/bash", "-c", f'set -euo pipefail; source "{self.root}/scripts/setup.sh"; {command}'],
                              env=self.environ, cwd="/", capture_output=True, text=True)

    def installed(self):
        return [line.removeprefix(str(self.root)) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_can_be_executed(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert script.stat().st_mode & stat.S_IXUSR
    assert script.name == "setup.sh" or "set -euo pipefail" in script.read_text()


def test_an_old_python3_is_passed_over_for_a_newer_one_on_the_path(house):
    house.python(house.bin / "python3", suits=False)
    house.python(house.bin / "python3.13")
    assert house.run("find_python").stdout.strip() == str(house.bin / "python3.13")


def test_pyenvs_versions_are_searched_when_the_path_has_none(house, tmp_path):
    house.python(house.bin / "python3.12", suits=False)      # as pyenv's shim of a version that is not active
    house.python(tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python")
    house.environ["PYENV_ROOT"] = str(tmp_path / "pyenv")
    assert house.run("find_python").stdout.strip().endswith("versions/3.12.9/bin/python")


def test_uv_is_asked_last(house, tmp_path):
    house.python(tmp_path / "uvs" / "python")
    executable(house.bin / "uv", f'[[ "$2" == find ]] && echo "{tmp_path}/uvs/python"')
    done = house.run("find_python")
    assert done.stdout.strip() == str(tmp_path / "uvs" / "python") and "asking uv" in done.stderr


def test_without_any_python_one_line_says_what_is_missing(house):
    done = house.run("setup_environment")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "3.12" in done.stderr and "venv" in done.stderr


def test_the_real_interpreter_suits_and_a_missing_one_does_not(house):
    assert house.run(f'suits "{sys.executable}"').returncode == 0
    assert house.run("suits /nowhere/python").returncode != 0


def test_it_installs_once_and_again_only_when_the_lock_changes(house):
    house.python(house.bin / "python3")
    first = house.run("setup_environment")
    assert first.returncode == 0, first.stderr
    assert "done in" in first.stdout and house.installed() == [""]
    assert house.run("setup_environment").stdout == "" and house.installed() == [""]
    with open(house.root / "requirements.lock", "a") as file:
        file.write("# changed\n")
    house.run("setup_environment")
    assert house.installed() == ["", ""]


def test_extras_add_up_over_the_scripts(house):
    house.python(house.bin / "python3")
    for command in ("setup_environment", "setup_environment dev", "setup_environment", "setup_environment dev"):
        assert house.run(command).returncode == 0
    assert house.installed() == ["", "[dev]"]


def test_a_broken_environment_is_made_again(house):
    house.python(house.bin / "python3")
    house.run("setup_environment")
    (house.root / ".venv" / "bin" / "python").unlink()
    done = house.run("setup_environment")
    assert done.returncode == 0 and "making .venv" in done.stdout


def test_a_failed_installation_is_not_taken_for_done(house):
    house.python(house.bin / "python3")
    assert house.run("setup_environment").returncode == 0
    python = house.root / ".venv" / "bin" / "python"
    working = python.read_text()
    executable(python, working.replace(">>", ">/nowhere/"))
    assert house.run("setup_environment dev").returncode == 1
    executable(python, working)                # what was there before may be half replaced: it is installed anew
    assert house.run("setup_environment").returncode == 0 and house.installed() == ["", ""]


@pytest.mark.parametrize("driver, extra, said", [("580.65.06", "[gpu]", ""), ("535.104", "", "580 or newer")])
def test_an_nvidia_gpu_gets_the_gpu_extra_if_its_driver_is_new_enough(house, driver, extra, said):
    house.python(house.bin / "python3")
    executable(house.bin / "nvidia-smi", f"echo {driver}; echo {driver}")
    done = house.run("setup_environment")
    assert house.installed() == [extra] and said in done.stdout


def test_quickstart_hands_its_arguments_on_and_generates_from_the_same_run(tmp_path):
    root, log = tmp_path / "house", tmp_path / "log"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "quickstart.sh", root / "scripts")
    executable(root / "python", f'[[ $1 == - ]] && exec "{sys.executable}" "$@"; printf "%s|" "$@" >>"{log}"; echo >>"{log}"')
    executable(root / "scripts" / "setup.sh", f'root="{root}"; python="{root}/python"; setup_environment() {{ :; }}')
    (tmp_path / "runs" / "b c").mkdir(parents=True)
    rows = '{"step": 1, "eval_bits_per_byte": 3.0}\n{"step": 2, "eval_bits_per_byte": 2.5}\n'
    (tmp_path / "runs" / "b c" / "metrics.jsonl").write_text(rows)
    run = ["bash", root / "scripts" / "quickstart.sh"]
    done = subprocess.run([*run, "--workdir=runs/b c", "--config.train.steps=2"], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "at step 2: 1.7329 nats per byte" in done.stdout
    train, generate = log.read_text().replace("ROMEO:\n", "ROMEO:").splitlines()
    assert train == "-m|jaxlm.train|--config=shakespeare|--workdir=runs/b c|--config.train.steps=2|"
    assert generate.startswith("-m|jaxlm.generate|runs/b c|--prompt=ROMEO:")
    assert "runs/b c" in done.stdout
    subprocess.run(run, cwd=root, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "|--workdir=runs/quickstart|" in log.read_text()
