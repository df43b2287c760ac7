"""Chips to compile for: what is known of them, and errors before anything starts."""

import importlib.util

import pytest

from partitioning import DeclarationError, target, targets


@pytest.mark.parametrize("name", targets.DEVICES_PER_HOST)
def test_each_has_a_name_that_jax_gives_it_and_a_memory(name):
    chip = target(name)
    assert name.upper() in chip.kind.upper() and chip.memory > 60 * 2**30 and chip.devices_per_host == 8


def test_an_unknown_one_is_an_error_that_says_which_are_known():
    with pytest.raises(DeclarationError, match="known targets: a100, h200"):
        target("tricorder")


def test_devices_that_do_not_fill_hosts_are_an_error_with_the_numbers_that_do():
    with pytest.raises(DeclarationError, match="12 devices do not fill hosts of 8 NVIDIA H200; what fits: 8 or 16 devices"):
        target("h200").devices(12)


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeclarationError, match=r"pip install -c requirements.lock -e '.\[compile\]'"):
        target("h200").devices(8)
