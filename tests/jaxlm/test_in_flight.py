"""Programs do not pile up: on simulated devices each ends before the next begins, elsewhere the oldest is waited for."""

import jax
import pytest

from jaxlm import evaluation, in_flight, sampling
from jaxlm.data import open_data
from jaxlm.in_flight import InFlight
from jaxlm.job import build_job
from jaxlm.sampling import Sampler, generation_layout
from tests.system.curves import config_of


@pytest.fixture
def waited(monkeypatch):
    """What has been waited for, in turn."""
    out = []
    monkeypatch.setattr(in_flight.jax, "block_until_ready", out.append)
    return out


def test_simulated_devices_run_one_program_at_a_time(waited):
    started = InFlight()
    assert [started.add(i) for i in range(4)] == waited == [0, 1, 2, 3]


def test_a_device_of_its_own_has_two_programs_in_its_queue(waited, monkeypatch):
    monkeypatch.setattr(in_flight.jax, "local_device_count", lambda: 1)
    started = InFlight()
    for i in range(5):
        started.add(i)
        assert waited == list(range(i - 1))


@pytest.fixture
def counted(monkeypatch):
    """Every result that evaluation and sampling hand to `InFlight`, and whether it was ready when they went on."""
    out = []

    class Counted(InFlight):
        def add(self, result):
            super().add(result)
            out.append(all(x.is_ready() for x in jax.tree.leaves(result)))
            return result
    for module in (evaluation, sampling):
        monkeypatch.setattr(module, "InFlight", Counted)
    return out


def test_evaluation_and_sampling_wait_for_each_program(counted):
    config = config_of(mesh__data=2, mesh__fsdp=2, train__eval_steps=5)
    job = build_job(config, 4).on_devices(jax.devices()[:4])
    params = job.initialise()["params"]
    assert evaluation.make_evaluate(job, open_data(config.data, config.model.vocab_size).eval)(params)["eval_loss"] > 1
    assert counted == [True] * 5
    list(Sampler(job.model, generation_layout(job)).generate(params, [5], max_new_tokens=3))
    assert counted == [True] * 8
