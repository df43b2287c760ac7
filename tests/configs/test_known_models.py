"""Configurations that people know have the parameter counts that people know."""

import importlib

import pytest

from jaxlm.config import to_config
from jaxlm.models import build_model, count_parameters


@pytest.mark.parametrize("name, count", [
    ("gpt2_124m", 124_439_808), ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496)])
def test_parameter_count_is_the_published_one(name, count):
    config = to_config(importlib.import_module(f"configs.{name}").get_config())
    assert count_parameters(build_model(config.model, remat=config.train.remat).specs) == count
