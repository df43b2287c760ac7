"""The house plan, held: what may import what, what an import may do, what is installed, how large a module may get."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from partitioning.mesh import AXES

ROOT = pathlib.Path(__file__).parent.parent
# Package -> prefixes of our own modules that it may import besides its own.
ALLOWED = {"configs": ("jaxlm.config", "partitioning"), "jaxlm": ("partitioning", "kernels"), "partitioning": (), "kernels": ()}
SOURCES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path):
    return str(path.relative_to(ROOT))


def imports_of(tree, package):
    """Absolute names of the modules that a module imports, wherever in it; `package` resolves relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden(module, package):
    """Whether `package` may not import `module`, one of ours."""
    top = module.split(".")[0]
    if top not in ALLOWED or top == package or (module, package) == ("configs", "jaxlm"):
        return False                           # the last: commands look up where the shipped files lie, and read them as files
    return not any(module == prefix or module.startswith(prefix + ".") for prefix in ALLOWED[package])


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_run_downwards_only(path):
    package = path.relative_to(ROOT).parts[0]
    found = {module for module in imports_of(ast.parse(path.read_text("utf-8")), ".".join(path.relative_to(ROOT).parent.parts))
             if forbidden(module, package)}
    assert not found, f"{name_of(path)} imports {sorted(found)}; {package} may import {ALLOWED[package] or 'none of ours'}"


def test_the_check_of_imports_sees_every_form():
    tree = ast.parse("import kernels.attention\nfrom partitioning import mesh\ndef f():\n    from ..logs import recorder\n")
    found = set(imports_of(tree, "jaxlm.models"))
    assert found == {"kernels.attention", "partitioning.mesh", "jaxlm.logs.recorder"}
    assert forbidden("jaxlm.train", "partitioning") and forbidden("jaxlm.train", "configs") and forbidden("jaxlm", "kernels")
    assert forbidden("configs.shakespeare", "jaxlm")
    assert not forbidden("jaxlm.config", "configs") and not forbidden("numpy", "kernels")


@pytest.mark.parametrize("path", [path for path in SOURCES if "models" in path.parts], ids=name_of)
def test_the_model_names_no_mesh_axis(path):
    strings = {node.value for node in ast.walk(ast.parse(path.read_text("utf-8")))
               if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not strings & set(AXES), f"{name_of(path)} speaks of mesh axes {strings & set(AXES)}; models know logical dims only"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_holds_one_concept(path):
    assert path.stem not in ("utils", "util", "common", "misc", "helpers"), f"{name_of(path)}: name the module after its concept"
    lines = len(path.read_text("utf-8").splitlines())
    assert lines <= 520, f"{name_of(path)} has {lines} lines; does it hold two concepts?"


IMPORT_EVERYTHING = """
import importlib, pkgutil, socket, sys
def refuse(*args, **kwargs): raise AssertionError("an import opened a socket")
socket.socket.connect = socket.socket.bind = socket.create_connection = socket.getaddrinfo = refuse
count = 0
for top in ("configs", "jaxlm", "partitioning", "kernels"):
    package = importlib.import_module(top)
    for info in pkgutil.walk_packages(package.__path__, top + "."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
            count += 1
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "an import started a JAX backend"
print(count)
"""


def test_importing_every_module_starts_no_backend_and_touches_no_network():
    done = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10


def test_import_jaxlm_is_light():
    code = "import sys, jaxlm; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"flax", "optax", "orbax", "grain", "tensorstore", "tokenizers", "tensorboardX", "wandb", "transformers"}
    assert not heavy & set(done.stdout.split())


def tracked_files():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_file_names_a_place_on_somebodys_machine():
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|Users|mnt|scratch)/[\w.]+")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue                           # no text
        found += [f"{name_of(path)}: {match}" for match in pattern.findall(text)]
    assert not found, found


def closure(requirements):
    """Names of the installed packages that these requirements need, themselves included."""
    seen, todo = set(), [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        needs = importlib.metadata.distribution(requirement.name).requires or []
        todo += [(Requirement(text), wanted) for text in needs for wanted in ("", *requirement.extras)]
    return {name for name, _ in seen}


CORE = PYPROJECT["project"]["dependencies"]


def test_the_core_is_small_and_free_of_other_frameworks():
    names = closure(CORE)
    assert not {name for name in names if re.match(r"torch|tensorflow|triton|nvidia", name)}
    assert len(names) <= 60, f"{len(names)} packages"
    size = sum(file.locate().stat().st_size for name in names for file in importlib.metadata.files(name) or ()
               if file.locate().is_file())
    assert size <= 900e6, f"{size / 1e6:.0f} MB"


def test_the_lock_pins_every_package_of_core_and_dev_and_nothing_twice():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.+]+", line) for line in lines)
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    missing = closure(CORE + PYPROJECT["project"]["optional-dependencies"]["dev"]) - set(pinned)
    assert not missing, f"not in requirements.lock: {sorted(missing)}"
    for text in CORE:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_no_name_is_unused_or_undefined_and_no_line_is_long():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_continuous_integration_runs_the_readmes_test_command():
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
