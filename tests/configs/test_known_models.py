"""Configurations that people know have the parameter counts that people know."""

import importlib

import pytest

from jaxlm.config import to_config
from jaxlm.models import build_model, count_parameters


COUNTS = [
    ("gpt2_124m", 124_439_808), ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496),
    ("smollm2_135m", 134_515_008),
    ("smollm2_1_7b", 1_711_376_384),
    ("llama3_2_1b", 1_235_814_400),
    ("mistral_7b", 7_241_732_096),
    ("qwen2_5_0_5b", 494_032_768),
    ("qwen2_5_7b", 7_615_616_512),
    ("qwen3_0_6b", 596_049_920),
    ("qwen3_8b", 8_190_735_360),
    ("gemma2_2b", 2_614_341_888),
    ("gemma2_9b", 9_241_705_984),
    ("gemma3_1b", 999_885_952),
    ("phi3_mini", 3_821_079_552),
    ("olmo2_7b", 7_298_617_344),
    ("glm4_9b", 9_399_951_360)
]


@pytest.mark.parametrize("name, count", COUNTS)
def test_parameter_count_is_the_published_one(name, count):
    config = to_config(importlib.import_module(f"configs.{name}").get_config())
    assert count_parameters(build_model(config.model, remat=config.train.remat).specs) == count
