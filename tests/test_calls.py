"""The tables of docs/calls.md, compared with calls: their order, and what hooks find."""

from __future__ import annotations

import re

import pytest
import torch

from tests.docs_blocks import PAGES, table_under
from tests.hook_calls import CALLS, ENTRIES
from topkv.errors import RequestError
from topkv.hooks import algorithm, backend, transfer
from topkv.kv.host_pool import POISON
from topkv.plugins.contract import spec_functions
from topkv.types import ModelShape
from topkv_testing.machines.lifecycle_model import doubles, make_coordinator
from topkv_testing.tiers import tier

PAGE = PAGES["calls.md"].read_text("utf-8")
HEADS, KV_HEADS, DIM = 4, 2, 4
MODEL = ModelShape(2, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
SIZES = {
    "unit": 4,
    "page_tokens": 8,
    "budget": 8,
    "buffer": 8,
    "ring_tokens": 8,
    "prefill_block_tokens": 16,
}


@pytest.fixture
def make():
    """Coordinators of a sparse layer and a resident one, whose plugins record their calls."""
    made = []

    def make(**options):
        plugins = {"backend": "recorded_gather", "transfer": "recorded_transfer"}
        made.append(
            make_coordinator(
                tier("cpu"),
                registry=doubles(*ENTRIES),
                model=MODEL,
                **{"layers": {"1": "resident"}, **plugins, **SIZES, **options},
            )
        )
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.close()


def attend(coordinator):
    """Call ``attention`` of every layer, with random rows."""
    rows, outputs = coordinator.forward.count, []
    for layer in coordinator.model.layers:
        q, k, v = (torch.randn(rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        outputs.append(coordinator.attention(layer, q, k, v))
    return outputs


def run(coordinator, **forward):
    coordinator.forward_begin(**forward)
    outputs = attend(coordinator)
    coordinator.forward_end()
    return outputs


def heard(call, dense):
    """Calls of the sparse and of the dense group while ``call`` runs, as the page has them."""
    CALLS.clear()
    call()
    cells = []
    for residency in ("sparse", dense):
        cells.append(", ".join(f"`{text}`" for of, text in CALLS if of == residency))
    return cells


OPTIONS = {
    "One request": {"algorithm": "whole", "params": {"settle_period": 2}},
    "A model that is sparse in prompts": {
        "algorithm": "prompting",
        "unit": 1,
        "budget": 4,
        "buffer": 4,
        "ring_tokens": 4,
    },
}
"""Sections with a table of calls, and the configuration behind each."""


@pytest.mark.parametrize("dense", ["resident", "streamed"])
@pytest.mark.parametrize("section", OPTIONS)
def test_hooks_are_called_as_the_page_says(section, dense, make):
    """Compare row by row. A streamed layer is called as a resident one."""
    _, (_, *first), *rows = table_under(PAGE, section)
    made = []
    options = {**OPTIONS[section], "layers": {"1": dense}}
    assert heard(lambda: made.append(make(**options)), dense) == first
    (coordinator,) = made
    names = {name: getattr(coordinator, name) for name in dir(coordinator) if name[0] != "_"}
    names |= dict.fromkeys(("layer", "q", "k", "v")) | {
        "attention": lambda *_: attend(coordinator)
    }
    reported = []
    for call, *cells in rows:
        found = heard(lambda call=call: eval(call.strip("`"), names), dense)
        reported.append((call, found, cells))
    assert [found for _, found, _ in reported] == [cells for *_, cells in reported], "\n".join(
        f"| {call} | {' | '.join(found)} |" for call, found, _ in reported
    )


def test_padded_rows_are_as_the_page_says(make):
    """Look up the names of the table for a padded row beside one that decodes."""
    coordinator = make(algorithm="whole")
    slot = coordinator.request_begin()
    run(coordinator, prefill=[(slot, 21)])
    coordinator.forward_begin(decode=[-1, slot])
    out = attend(coordinator)[0]
    lanes, heads = coordinator.layers[0].lanes, coordinator.layers[0].view.group.lane_heads
    names = {
        "step": coordinator.step,
        "ids": lanes.selection.ids,
        "limit": lanes.limit,
        "out": out,
    }
    names |= {"plan": lanes.plans[0], "tables": lanes.tables, "lse": lanes.lse}
    for name, value, _ in table_under(PAGE, "Rows")[1:]:
        tensor = eval(name.strip("`"), names)
        rows = tensor[: heads if len(tensor) == 2 * heads else 1]
        assert (rows == float(value.strip("`"))).all(), f"{name}: {rows}"
    coordinator.forward_abort()


def test_more_rows_than_requests_are_refused(make):
    coordinator = make(algorithm="whole")
    most = coordinator.config.max_requests
    coordinator.forward_begin(decode=[-1] * most)
    coordinator.forward_abort()
    with pytest.raises(RequestError, match="exceed max_requests"):
        coordinator.forward_begin(decode=[-1] * (most + 1))


def said(values, mark):
    """Name the values of a pool that held ``mark`` as the page does."""
    if (values == mark).all():
        return "as it was"
    if (values.contiguous().view(torch.uint8) == POISON).all():
        return f"bytes {POISON:#x}".replace("0xff", "0xFF")
    assert (values == 0).all(), values
    return "0"


def keys_of(grain, coordinator, slot):
    """Indices of a pool that belong to a request: of its open page, or of its slot."""
    if grain == "request":
        return [slot]
    group = coordinator.manager.groups[0]
    per_page = group.units_per_page if grain == "unit" else group.page_tokens
    page = coordinator.requests.pages.of(slot)[-1]
    return range(page * per_page, (page + 1) * per_page)


@pytest.mark.parametrize("grain", ["unit", "token", "request"])
def test_pools_hold_what_the_page_says(grain, make):
    """Look before the first write, after a fork and a rollback, and when a request has ended."""
    head, *rows = table_under(PAGE, "Pools")
    (expected,) = (row for row in rows if row[0] == f"`{grain}`")
    found = {}
    for poison in (False, True):
        coordinator = make(algorithm="every_grain", poison=poison)
        pool = coordinator.manager.representations[0].pools[grain][0]
        slot = coordinator.request_begin()
        run(coordinator, prefill=[(slot, 13)])
        keys = list(keys_of(grain, coordinator, slot))
        found["at first"] = said(pool[keys], 7)
        pool[keys] = 7
        twin = coordinator.fork(slot)
        copied = list(keys_of(grain, coordinator, twin))
        assert copied != keys, "the open page and the slot are the twin's own"
        found["in a fork"] = said(pool[copied], 7).replace("as it was", "copied")
        coordinator.rollback(slot, 10)
        found["after a rollback"] = said(pool[keys], 7)
        coordinator.request_end(slot)
        found["after the end" + ", `poison`" * poison] = said(pool[keys], 7)
    assert [found[title] for title in head[1:]] == expected[1:]


def test_every_hook_is_on_the_page():
    """Hooks of the three kinds that are called in a forward have a row."""
    named = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", PAGE))
    for page in (algorithm, backend, transfer):
        assert set(spec_functions(page)) <= named, set(spec_functions(page)) - named
