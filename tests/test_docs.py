"""The README and docs are true where a machine can tell: links lead somewhere, commands and configurations exist."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    assert all((page.parent / link).exists() for link in links if link), links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_configurations_and_files_that_are_named_exist(page):
    text = page.read_text()
    assert all(importlib.util.find_spec(module) for module in re.findall(r"python -m (jaxlm\.\w+)", text))
    assert all((ROOT / "configs" / f"{name}.py").exists() for name in re.findall(r"--config=(\w+)(?![\w./])", text))
    folders = "scripts|tests|kernels|jaxlm|partitioning|configs"
    assert all((ROOT / name).exists() for name in re.findall(rf"`((?:{folders})/[\w/.]+)`", text))


def test_the_table_of_configurations_has_their_parameter_counts():
    from jaxlm.commandline import load_config, shipped_configs
    from jaxlm.models import build_model, count_parameters

    table = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d,]+) \|$", (ROOT / "README.md").read_text(), re.M))
    assert table.keys() == shipped_configs().keys()
    for name, count in table.items():
        assert count_parameters(build_model(load_config(name).model).specs) == int(count.replace(",", ""))
