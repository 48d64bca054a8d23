"""The hook API as it stands: a change of a hook without a new version fails here."""

from __future__ import annotations

import inspect
from importlib import import_module

from topkv.entries import HOOK_API, KINDS
from topkv.hooks.binding import spec_functions

EXPECTED = {
    (1, 1): {
        "algorithm.spec": "",
        "algorithm.construct": "layer slot start k q lse",
        "algorithm.settle": "layer slot since length history",
        "algorithm.update": "layer k",
        "algorithm.retrieve_topk": "layer q native ids",
        "algorithm.retrieve_prompt": "layer slot start q native ids",
        "backend.adapt_page_table": "layer plan table lengths",
        "backend.attend": "q k v table lengths out lse",
        "backend.prefill": "q k v q_start k_start out lse",
        "backend.prefill_selected": "q k v q_start k_start keep out lse",
        "transfer.append": "layer k v",
        "transfer.plan": "layer ids limit out",
        "transfer.load": "layer plan",
        "transfer.offload": "",
        "transfer.store_chunk": "layer slot start k v high resident",
        "transfer.fetch": "layer slot start k v",
        "transfer.flush": "slot length high resident",
        "transfer.restore": "slot length resident",
        "transfer.reset": "slot",
        "eviction.new_position": "position stale stale_rank hit_rank stale_count misses slots",
        "topk.topk": "scores lengths ids",
        "engine.refusals": "model",
        "engine.attach": "model config",
        "observer.before_forward": "slots prefill_tokens",
        "observer.after_forward": "slots prefill_tokens",
    }
}


def hooks():
    for kind in KINDS:
        for name, function in spec_functions(import_module(f"topkv.hooks.{kind}")).items():
            yield kind, name, function


def test_arguments_change_only_with_the_version():
    found = {
        f"{kind}.{name}": " ".join(inspect.signature(function).parameters)
        for kind, name, function in hooks()
    }
    assert found == EXPECTED[HOOK_API]


def test_every_hook_says_what_it_is_for():
    for kind, name, function in hooks():
        assert len(inspect.getdoc(function) or "") > 20, f"{kind}.{name}"
        for argument in inspect.signature(function).parameters:
            if argument not in ("layer", "slot", "plan", "out"):
                assert argument in function.__doc__, f"{kind}.{name} is silent about {argument}"
