"""Which pages stay of a long answer: those that queries to come are expected to look at.

TriAttention (Mao et al., arXiv 2604.04921), whole pages at a time. Differences from the paper are
in the README.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import fields, frozen
from torch import Tensor

from topkv import hookimpl
from topkv.algorithms import appended_units, chunk_units, open_units, write_units
from topkv.errors import ConfigError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import Keeping, StageSetup, StageSpec
from topkv.types import LayerView
from topkv_triattention import reference
from topkv_triattention.calibration import MAKE, LayerQueries, read

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@frozen(eq=False)
class Expected:
    """The calibration of a layer on its device, see ``reference.weights``.

    Attributes:
        q: complex128 ``[H, D / 2]``.
        size: fp64 ``[H, D / 2]``.
        omega: fp64 ``[D / 2]``.
        pairs: int32 ``[2, D / 2]``.
    """

    q: Tensor
    size: Tensor
    omega: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, found: LayerQueries, device: torch.device) -> Expected:
        size, omega, mean = (
            torch.tensor(each, dtype=torch.float64, device=device)
            for each in (found.size, found.frequencies, found.mean)
        )
        pairs = torch.tensor(found.pairs, dtype=torch.int32, device=device).T.contiguous()
        return cls(torch.complex(mean[:, pairs[0]], mean[:, pairs[1]]), size, omega, pairs)


class TriAttention:
    """Says what pages are worth by how much the queries to come are expected to look at them.

    Of every unit and kv-head it keeps the mean of the keys and of the sizes of their pairs, in the
    dtype of the model: a function of the keys of the unit alone. The mean score of the tokens of a
    page follows from that exactly, since scores are linear in both: see ``reference``.

    It selects nothing and corrects nothing, and goes with any algorithm that keeps nothing else
    of a request than what stands in its pages.

    Attributes:
        keeping: what stays, by the parameters.
        expected: of each layer of the group.
    """

    def __init__(self, setup: StageSetup) -> None:
        """Raises ConfigError with all reasons, those of the calibration file included."""
        self.model, self.group = setup.model, setup.group
        sizes = {each.name: setup.params[each.name] for each in fields(Keeping)}
        reasons = [
            f"{name} must be an integer of {least} or more, got {value!r}"
            for name, value in sizes.items()
            for least in (int(name in ("tokens", "every")),)
            if type(value) is not int or value < least
        ]
        if self.model.dtype not in DTYPES:
            reasons.append(f"keys of {self.model.dtype} are not supported, only of {DTYPES}")
        if self.group.dtype is not self.model.dtype:
            reasons.append(
                f"means are those of rows of {self.model.dtype}, and they are stored as "
                f"{self.group.dtype}; set kv_format to 'model'"
            )
        if self.model.head_dim % 2:
            reasons.append(f"RoPE turns pairs of channels, got head dim {self.model.head_dim}")
        found = self._read(setup.params["calibration"], reasons)
        if reasons:
            raise ConfigError(type(self).__name__, reasons)
        self.keeping = Keeping(**sizes)
        self.expected = {layer: Expected.of(found[layer], setup.device) for layer in found}

    def _read(self, path: object, reasons: list[str]) -> dict[int, LayerQueries]:
        """What a calibration file says; ``reasons`` grow where it cannot be used."""
        if not isinstance(path, str) or not path:
            reasons.append(f"calibration must be the path of a file, got {path!r}; {MAKE}")
            return {}
        try:
            return read(path, self.group.layers, self.model.num_heads, self.model.head_dim)
        except ConfigError as error:
            reasons += [f"calibration file {path!r}: {reason}" for reason in error.reasons]
            return {}

    @hookimpl
    def spec(self) -> StageSpec:
        shape = (self.model.num_kv_heads, self.model.head_dim * 3 // 2)
        pool = RepresentationSpec("means", "unit", shape, self.model.dtype)
        return StageSpec((pool,), keeping=self.keeping)

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        units, keys, valid = chunk_units(self.group, start, k)
        self._write(layer, torch.full_like(units, slot), units, keys, valid)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        # There is no ring where selections are regranulated: units are then of one token.
        keys = k[:, None] if self.group.unit == 1 else open_units(layer, layer.ring_k)
        slots, units, valid = appended_units(layer)
        self._write(layer, slots, units, keys, valid)

    def _write(
        self, layer: LayerView, slots: Tensor, units: Tensor, keys: Tensor, valid: Tensor
    ) -> None:
        pairs = self.expected[layer.layer].pairs
        new: dict[str, Any] = {"means": reference.summary(keys, valid, pairs)}
        write_units(layer, slots, units, new)

    @hookimpl
    def keep(
        self, layer: LayerView, slot: int, length: int, position: int, scores: Tensor
    ) -> None:
        group, known = self.group, self.expected[layer.layer]
        rows = layer.step.page_table[slot, : scores.shape[1]].long()
        units = layer.pools["means"].unflatten(0, (-1, group.units_per_page))[rows]
        by = reference.weights(known.q, known.size, known.omega, known.pairs, position)
        scores.copy_(reference.worth(units.double().mean(1), by, group.lane_heads))
