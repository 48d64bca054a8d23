"""Another process with a model of its own, which finds and stores pages in the same folder."""

from __future__ import annotations

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from topkv_testing.integrity import check_integrity


@cache
def process():
    """The process, which serves until this one ends."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def asked(*given):
    """``answer`` there."""
    return process().submit(answer, *given).result(timeout=300)


@cache
def _tiny(device):
    # The name conftest is that of several files.
    spec = importlib.util.spec_from_file_location(
        "tiny_models", Path(__file__).with_name("conftest.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Tiny(device)


def answer(device, kind, changes, settings, ids, salt):
    """Make the model anew, change it, and ask it and a copy that nothing is attached to.

    Args:
        device: of the model.
        kind: name of a kind of model, see ``model_lives.KINDS``.
        changes: names and numbers, in their order.
        settings: of ``attach``; its storage is a folder.
        ids: list of a prompt.
        salt: of the cache.

    Returns:
        Tokens found in the storage, and the largest difference of the first logits.
    """
    import torch
    from model_lives import KINDS, Life, stock_of

    import topkv

    make, change, _ = KINDS[kind]
    tiny = _tiny(device)
    model = make(tiny.model(layers=2))
    for each in changes:
        change(model, *each)
    stock = stock_of(model)
    prompt = torch.tensor([ids], device=tiny.device)
    handle = topkv.attach(model, settings)
    try:
        logits = Life.answer(model, prompt, cache_salt=salt)[1]
        found = handle.prefixes.counts.found
        check_integrity(handle.coordinator)
    finally:
        handle.detach()
    expected = Life.answer(stock, prompt, steps=1)[1]
    return found, float((logits[:, :1] - expected).abs().max())
