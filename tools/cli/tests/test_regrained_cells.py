"""Cells of the matrix in which a stage turns tokens into units."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv.plugins import PluginRegistry
from topkv_cli.matrix import matrix, rows_of


class Entries:
    """An algorithm of single tokens, a backend of larger units, and a stage between them."""

    def __init__(self, stage, **algorithm):
        told = Capabilities(**algorithm)
        self.algorithm = PluginEntry(
            "picks", "algorithm", "x:Y", capabilities=told, defaults={"unit": 1}
        )
        self.backend = PluginEntry(
            "reads", "backend", "x:Y", capabilities=Capabilities(units=(16, 64))
        )
        self.stage = PluginEntry("turns", "stage", "x:Y", capabilities=stage)

    @hookimpl
    def topkv_register_algorithms(self):
        return [self.algorithm]

    @hookimpl
    def topkv_register_backends(self):
        return [self.backend]

    @hookimpl
    def topkv_register_stages(self):
        return [self.stage]


TURNS = Capabilities(regrains=True, tiers=("cpu", "interpret"))


def cells(stage=TURNS, **algorithm):
    """Cells by attention, scope and unit, and the rows of the table."""
    registry = PluginRegistry([("topkv-fake", "0.3", Entries(stage, **algorithm))])
    found = matrix(registry.records())
    return {(c.attention, c.scope, c.unit): c for c in found}, rows_of(found)[1]


def test_a_stage_helps_where_single_tokens_are_selected():
    found, rows = cells(units=(1, 1), tiers=("cpu", "gpu"))
    assert {found["gqa", "shared", unit].state for unit in (1, 16, 64)} == {"refused"}
    assert found["gqa", "shared", 1].stage is None
    cell = found["gqa", "shared", 16]
    assert (cell.stage, cell.behind) == ("turns", ("cpu",))
    assert found["mla", "shared", 16].stage is None
    assert ["picks", "gqa", "shared", "1", "takes units of 16 to 64 tokens"] in rows
    assert ["picks", "gqa", "shared", "16", "turns: cpu"] in rows


def test_a_stage_that_runs_nowhere_with_both_is_untested():
    found, rows = cells(units=(1, 1), tiers=())
    assert (found["gqa", "shared", 16].stage, found["gqa", "shared", 16].behind) == ("turns", ())
    assert ["picks", "gqa", "shared", "16", "turns: untested"] in rows


def test_no_stage_helps_an_algorithm_of_other_units_and_no_other_stage_does():
    for found, rows in (cells(units=(1, 8)), cells(Capabilities(), units=(1, 1))):
        assert not any(cell.stage for cell in found.values())
        assert {row[3] for row in rows} == {"1"}
