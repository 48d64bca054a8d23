"""The lifecycle machine over selections of tokens that are stored and attended by larger units.

Lives are those of ``lifecycle``; the algorithm selects any set of tokens, and a stage turns them
into units: that of ``models.stage_doubles``, or that of an author's ``stage``. A registry has to
hold ``SCRIPTED_TOKENS``, ``COMPETING_TOKENS`` and the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from torch import Tensor

from tests.machines.lifecycle_tokens import TokenLives
from topkv.entries import PluginEntry
from topkv_testing.machines.lifecycle_model import SPARSE, Forward, Given, doubles
from topkv_testing.models.cache_model import RequestModel
from topkv_testing.models.doubles import SCRIPTED

SCRIPTED_TOKENS = evolve(
    SCRIPTED,
    name="scripted_tokens",
    capabilities=evolve(SCRIPTED.capabilities, units=(1, 1)),
    defaults={"scope": "kv_head", "unit": 1},
)
"""``SCRIPTED`` of single tokens, whose representation is their key."""

COMPETING_TOKENS = evolve(
    SCRIPTED_TOKENS,
    name="competing_tokens",
    capabilities=evolve(SCRIPTED_TOKENS.capabilities, tail="selectable"),
)


class RegrainedMachine(TokenLives):
    """Lives in which tokens are selected, and units of 2 or 4 are moved and attended.

    Attributes:
        stage: name of the stage, which lists all closed units that hold a selected token.
        further: entries that it needs beside the doubles.
    """

    few = (50, 4, 10)
    stage = "to_units"
    further: tuple[PluginEntry, ...] = ()

    @initialize(
        scope=st.sampled_from(["kv_head", "shared"]),
        unit=st.sampled_from([2, 4]),
        other=st.sampled_from([None, None, 1, 4]),
        tail=st.sampled_from(["forced", "selectable"]),
        select=st.integers(1, 9),
        spare=st.sampled_from([0, 1, 6]),
        fast=st.booleans(),
        page=st.sampled_from([4, 8]),
        host_format=st.sampled_from(["model", "model", "fp8"]),
        seed=st.integers(0, 9),
    )
    def start(
        self, scope: str = "kv_head", unit: int = 2,
        other: int | None = None, tail: str = "forced", select: int = 6, spare: int = 0,
        fast: bool = True, page: int = 4, host_format: str = "model", seed: int = 0,
    ) -> None:  # fmt: skip
        """``other`` is the unit of the second sparse layer, in a group of its own; ``select`` are
        tokens, ``spare`` units that the buffer has beyond one for each of them."""
        layers: dict[str, Any] = {"1": "resident", "2": "streamed"}
        if other is not None:
            sizes = {"budget": other + select, "buffer": (select + spare) * other}
            layers["3"] = {"unit": other, "scope": "shared", **sizes}
            layers["3"] |= {"stages": []} if other == 1 else {}
        entries = (SCRIPTED_TOKENS, COMPETING_TOKENS, *self.further)
        self.registry = self.registry or doubles(*entries)
        self.set_up(
            seed,
            fast,
            # Where units are tokens a tail that competes is no unit.
            algorithm=f"{'scripted' if other == 1 or tail == 'forced' else 'competing'}_tokens",
            stages=[self.stage],
            host_format=self.offered(host_format),
            scope=scope,
            unit=unit,
            budget=unit + select,
            buffer=(select + spare) * unit,
            page_tokens=page,
            ring_tokens=2 * max(unit, other or 1),
            layers=layers,
        )
        self.begin_request()

    # Selections of the algorithm.

    def _ids(self, rows: Sequence[int], widest: int, alike: bool = False) -> dict[int, Tensor]:
        """Draw different tokens in any order, -1 anywhere, and now and then one far away."""
        chosen = {}
        for layer, group in self.groups.items():
            select, lanes = self._width(layer), (len(rows), group.lane_heads)
            among = max(widest * group.unit, select)
            order = torch.rand((*lanes, among), generator=self.generator).argsort(-1)
            ids = order[..., :select]
            ids[torch.rand(ids.shape, generator=self.generator) < 0.25] = -1
            ids[..., 0][torch.rand(lanes, generator=self.generator) < 0.05] = 2**31 - 1
            chosen[layer] = (ids[:1].expand(ids.shape) if alike and len(rows) else ids).int()
        return chosen

    def _compare(
        self, todo: Forward, outs: list[Tensor], given: Given, ids: dict[int, Tensor]
    ) -> None:
        """Compare, and look at the units that the last sparse layer has left in its lanes."""
        super()._compare(todo, outs, given, ids)
        layer = SPARSE[-1]
        unit, buffers = self.groups[layer].unit, self.coordinator.layers[layer].lanes
        left = buffers.selection.ids.tolist()
        if layer >= len(outs) or unit == 1:
            return
        for row, slot in enumerate(todo.rows):
            length = self.live[slot].length + (row in todo.appending) if slot >= 0 else 0
            end, lanes = max(0, length - 1) // unit, ids[layer][row].tolist()
            for lane, tokens in enumerate(lanes, start=row * len(lanes)):
                units = {token // unit for token in tokens if token >= 0}
                closed = sorted(each for each in units if each < end)
                listed = sorted(each for each in left[lane] if each != -1)
                assert listed == closed, f"lane {lane} has units {listed}, and tokens {tokens}"

    def _check_representations(self, layer: int, request: RequestModel, hosts: Tensor) -> None:
        """Check keys, one a token; ``hosts`` are the host ids of the closed units."""
        tokens = self._token_hosts(layer, hosts)
        sums = self.coordinator.layers[layer].view.pools["sums"][tokens].cpu()
        assert torch.equal(sums, request.k[layer][: len(tokens)]), "keys of tokens"
