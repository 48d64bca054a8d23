"""The hook API as it stands: a change of a hook without a new version fails here."""

from __future__ import annotations

import inspect
from importlib import import_module

import attrs

from topkv.entries import HOOK_API, KINDS
from topkv.plugins.contract import spec_functions
from topkv.plugins.discovery import OPTIONAL

EXPECTED = {
    (3, 0): {
        "algorithm.spec": "self",
        "algorithm.construct": "self layer slot start k v q lse",
        "algorithm.settle": "self layer slot since length history",
        "algorithm.update": "self layer k v",
        "algorithm.retrieve_topk": "self layer q weights out",
        "algorithm.correct": "self layer q selection out lse",
        "algorithm.retrieve_prompt": "self layer slot start q weights ids",
        "algorithm.truncated": "self layer slot length",
        "stage.spec": "self",
        "stage.construct": "self layer slot start k v q lse",
        "stage.update": "self layer k v",
        "stage.refine": "self layer q candidates out",
        "stage.correct": "self layer q selection out lse",
        "stage.bind": "self coordinator",
        "backend.adapt_page_table": "self layer plan tables",
        "backend.attend": "self q k v tables out lse",
        "backend.prefill": "self q k v q_start k_start out lse",
        "backend.prefill_selected": "self q k v q_start k_start ids out lse",
        "transfer.append": "self layer k v",
        "transfer.plan": "self layer ids limit out",
        "transfer.load": "self layer plan",
        "transfer.offload": "self",
        "transfer.store_chunk": "self layer slot start k v high resident",
        "transfer.fetch": "self layer slot start k v",
        "transfer.flush": "self slot length high resident",
        "transfer.restore": "self slot length resident",
        "transfer.reset": "self slot",
        "eviction.new_position": (
            "self position stale stale_rank hit_rank stale_count misses slots state"
        ),
        "eviction.new_state": "self state stale stale_rank misses slots",
        "topk.topk": "self scores lengths ids",
        "engine.refusals": "self model",
        "engine.attach": "self model config",
        "observer.bind_layers": "self layers",
        "observer.before_forward": "self report",
        "observer.after_forward": "self report",
        "keeper.host_pool": "self",
        "keeper.bind": "self coordinator",
        "kv_format.row": "self",
        "kv_format.pack": "self k v out",
        "kv_format.unpack": "self k v dtype",
        "host_format.coded_bytes": "self",
        "host_format.round": "self k v out",
        "host_format.parts": "self entries",
        "host_format.encode": "self rows",
        "host_format.decode": "self parts",
        "host_format.kernels": "self",
    }
}

OPTIONAL_HOOKS = {
    "algorithm.settle",
    "algorithm.correct",
    "algorithm.retrieve_prompt",
    "algorithm.truncated",
    "stage.construct",
    "stage.update",
    "stage.refine",
    "stage.correct",
    "stage.bind",
    "backend.prefill_selected",
    "eviction.new_state",
    "observer.bind_layers",
    "host_format.kernels",
}

SETUPS = {
    "algorithm": ("AlgorithmSetup", "model group params device topk max_queries"),
    "stage": ("StageSetup", "model group params device max_queries"),
    "backend": ("BackendSetup", "model group device max_batch group_size options max_queries"),
    "transfer": ("TransferSetup", "store layers eviction max_queries"),
    "eviction": ("EvictionSetup", "device"),
    "topk": ("TopKSetup", "rows columns select device"),
    "engine": ("EngineSetup", "registry"),
    "observer": ("ObserverSetup", "config params"),
    "keeper": ("KeeperSetup", "params config registry"),
    "kv_format": ("KVFormatSetup", "model"),
    "host_format": ("HostFormatSetup", "model group"),
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


def test_hooks_that_may_be_left_out_change_only_with_the_version():
    found = {f"{kind}.{name}" for kind, name, hook in hooks() if hasattr(hook, OPTIONAL)}
    assert found == OPTIONAL_HOOKS


def test_what_factories_take_changes_only_with_the_version():
    found = {}
    for kind in KINDS:
        page = import_module(f"topkv.hooks.{kind}")
        (setup,) = (cls for cls in vars(page).values() if _is_setup(cls, page))
        fields = " ".join(field.name for field in attrs.fields(setup))
        found[kind] = (setup.__name__, fields)
        for field in attrs.fields(setup):
            assert field.name in setup.__doc__, f"{setup.__name__} is silent about {field.name}"
    assert found == SETUPS


def _is_setup(cls, page):
    own = inspect.isclass(cls) and cls.__module__ == page.__name__
    return own and cls.__name__.endswith("Setup")


def test_every_hook_says_what_it_is_for():
    for kind, name, function in hooks():
        assert len(inspect.getdoc(function) or "") > 20, f"{kind}.{name}"
        for argument in inspect.signature(function).parameters:
            if argument not in ("self", "layer", "slot", "plan", "out", "report"):
                assert argument in function.__doc__, f"{kind}.{name} is silent about {argument}"
