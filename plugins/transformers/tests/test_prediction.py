"""Predictions of an attached model's steps: from which numbers, and who gets them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import topkv
from topkv.errors import CapabilityError, ConfigError, DeviceMemoryError
from topkv_prediction.report import HIT_RATE
from topkv_transformers import engine
from topkv_transformers.prediction import report, weights_read

RATES = {"link": 50.0, "bandwidth": 4000.0}
SPARSE = {"budget": 32, "buffer": 32}


def test_a_prediction_is_of_this_model_and_what_it_counted(tiny):
    model = tiny.model()
    with topkv.attach(model, tiny.settings(**SPARSE)) as handle:
        fresh = handle.prediction(**RATES)
        assert (fresh.context, fresh.requests, fresh.hit_rate) == (640, 4, HIT_RATE)
        machine, layers = fresh.machine, handle.shape.num_layers
        assert (machine.link, machine.memory) == (50.0, 4000.0)
        assert fresh.topkv.model == machine.model_ms(weights_read(model), layers)
        assert fresh.topkv.link > 0
        model.generate(**tiny.prompt(200), max_new_tokens=16, do_sample=False)
        counted = handle.stats().transfers
        assert 0 < counted.hit_rate < 1
        later = handle.prediction(**RATES)
        assert later.hit_rate == counted.hit_rate
        assert later.topkv.link == pytest.approx(
            fresh.topkv.link * (1 - counted.hit_rate) / (1 - HIT_RATE)
        )
        assert handle.prediction(**RATES, hit_rate=1).topkv.link == 0
        size = handle.prediction(131072, 6, **RATES, memory=2**34)
        assert (size.context, size.requests, size.memory) == (131072, 6, 2**34)
        assert size.resident.ms > fresh.resident.ms
        if tiny.device.type == "cuda":
            assert handle.prediction(**RATES).memory > handle.memory().device
        else:
            assert fresh.memory is None


def test_an_embedding_is_read_where_it_is_the_head(tiny):
    apart, tied = tiny.model(), tiny.model(tie_word_embeddings=True)
    embedding = apart.get_input_embeddings().weight.nbytes
    assert weights_read(apart) == sum(each.nbytes for each in apart.parameters()) - embedding
    assert weights_read(tied) == weights_read(apart)


def test_rates_are_measured_or_given(tiny):
    if tiny.device.type == "cuda":
        pytest.skip("this is for machines without a GPU")
    with topkv.attach(tiny.model(), tiny.settings()) as handle:
        for given in ({}, {"link": 50.0}, {"bandwidth": 4000.0}):
            with pytest.raises(CapabilityError, match="measured on cpu; give link and bandwidth"):
                handle.prediction(**given)
        with pytest.raises(ConfigError) as caught:
            handle.prediction(0, link=-1, bandwidth=float("inf"), memory="16GiB")
        assert len(caught.value.reasons) == 4


def raising(error):
    def call(*args):
        raise error

    return call


def of_a_gpu(prediction, off=()):
    """The parts of a handle that ``report`` reads."""
    config = SimpleNamespace(device=torch.device("cuda"))
    capture = SimpleNamespace(off=list(off))
    return SimpleNamespace(config=config, capture=capture, prediction=prediction)


def test_who_listens_gets_a_report(caplog):
    def predicted():
        return "8 ms a step"

    report(of_a_gpu(predicted))
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "topkv"):
        report(of_a_gpu(predicted))
        report(of_a_gpu(predicted, ["the setting capture is 'off'"]))
        assert caplog.messages == [
            "8 ms a step",
            "8 ms a step\nsteps are not captured (the setting capture is 'off'), so both take "
            "longer than this",
        ]
        report(of_a_gpu(raising(DeviceMemoryError("full"))))
        assert caplog.messages[2].endswith("no room to measure the GPU: full")
        with pytest.raises(OSError, match="unplugged"):
            report(of_a_gpu(raising(OSError("unplugged"))))


def test_a_model_is_as_it_was_where_reporting_fails(tiny, monkeypatch):
    model, prompt = tiny.model(), tiny.prompt(12)
    monkeypatch.setattr(engine, "report", raising(OSError("unplugged")))
    with pytest.raises(OSError, match="unplugged"):
        topkv.attach(model, tiny.settings())
    monkeypatch.undo()
    with topkv.attach(model, tiny.settings()):
        model.generate(**prompt, max_new_tokens=2, do_sample=False)


def test_attach_reports_on_a_gpu_alone(tiny, caplog):
    with caplog.at_level(logging.INFO, "topkv.prediction"):
        topkv.attach(tiny.model(), tiny.settings()).detach()
    reported = [each.getMessage() for each in caplog.records if each.name == "topkv.prediction"]
    assert len(reported) == (tiny.device.type == "cuda")
    assert all("ms a step" in each for each in reported)
