"""An attached model of the engine suite, beside the oracle for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from topkv.config import SparseConfig
from topkv.hooks.engine import EngineSetup
from topkv.plugins import PluginRegistry
from topkv_testing.engine.case import EngineCase
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import Subject
from topkv_testing.models.doubles import Entries
from topkv_testing.models.engine_doubles import ROVING, WATCHER, Fault, Watcher, roving_units
from topkv_testing.tolerance import assert_as_good

UNIT, RING, PAGE, LONGEST, ROWS = 4, 8, 16, 80, 3
COVERING = {"budget": LONGEST, "buffer": LONGEST}
SWAPPING = {"budget": 16, "buffer": 20}


@define
class Bench:
    """Makes and attaches the models of a case.

    Attributes:
        subject: the engine on a tier; its options are the ``EngineCase``.
        registry: the engine, the doubles of the kit, and those of this suite.
        seed: of the weights.
    """

    subject: Subject
    seed: int = 0
    registry: PluginRegistry = field(init=False)

    def __attrs_post_init__(self) -> None:
        offered = Entries(self.subject.entry, ROVING, WATCHER)
        self.registry = PluginRegistry([("topkv-testing", "0", offered)])

    @property
    def case(self) -> EngineCase:
        if not isinstance(self.subject.options, EngineCase):
            raise TypeError(
                "the fixture 'options' of an EngineTests class must give an EngineCase, got "
                f"{type(self.subject.options).__name__}"
            )
        return self.subject.options

    def engine(self) -> Any:
        return self.registry.create("engine", self.subject.entry.name, EngineSetup(self.registry))

    def model(self) -> Any:
        return self.case.make_model(self.seed, self.subject.tier.device)

    def config(self, **changes: Any) -> SparseConfig:
        """A configuration of small pages that covers every sequence; changes come on top."""
        values = {
            "algorithm": "roving",
            "backend": "gather",
            "impl": self.subject.tier.impl,
            "unit": UNIT,
            "ring_tokens": RING,
            "page_tokens": PAGE,
            "max_requests": ROWS,
            "max_tokens": ROWS * LONGEST,
            "max_request_tokens": LONGEST,
            "dense_layers": [],
            "prefill_block_tokens": 2 * PAGE,
            "poison": True,
            "observers": ["watcher"],
            "capture": "off",  # each step is looked at on the host
            **COVERING,
        }
        return SparseConfig.load(self.case.settings(**{**values, **changes}))

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        known = self.case.tokens
        picks = (torch.randint(len(known), (n,), generator=generator).tolist() for n in lengths)
        return [[known[pick] for pick in row] for row in picks]

    @contextmanager
    def attached(self, model: Any = None, **changes: Any) -> Iterator[Attached]:
        """An attached model; detached at the end."""
        model = self.model() if model is None else model
        handle = self.engine().attach(model, self.config(**changes))
        try:
            yield Attached(self, model, handle)
        finally:
            handle.detach()


@define
class Attached:
    """An attached model, and a twin of it that is not.

    Attributes:
        bench: where it comes from.
        model, handle: the model, and what ``attach`` returned.
        coordinator: that of the handle.
        watcher: the observer that the coordinator made.
        twin: a model with the same weights, for the oracle.
    """

    bench: Bench
    model: Any
    handle: Any
    coordinator: Any = field(init=False)
    watcher: Watcher = field(init=False)
    twin: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.coordinator = self.bench.case.coordinator(self.handle)
        seen = list(self.coordinator.observers.named.values())
        assert len(seen) == 1, "the coordinator must be made with the registry of the engine"
        self.watcher = seen[0]
        self.watcher.coordinator = self.coordinator
        self.twin = self.bench.model()

    def fail(self, error: BaseException, decode: bool, calls: int) -> None:
        """Have the last layer raise, see ``Fault``."""
        path = self.coordinator.layers[-1]
        path.algorithm.fault = Fault(error, decode, path.view.layer, calls)

    def generate(
        self, prompts: list[list[int]], steps: int, chunk: int | None = None
    ) -> list[list[int]]:
        """Generate, and check logits, tokens, and that nothing is left of the requests."""
        self.watcher.forget()
        tokens, logits = self.bench.case.generate(self.model, prompts, steps, chunk)
        assert [len(row) for row in tokens] == [steps] * len(prompts)
        assert tokens == logits.argmax(-1).tolist(), "the tokens are not those of the logits"
        self.assert_all_free()
        self._assert_right(prompts, tokens, logits)
        return tokens

    def _assert_right(
        self, prompts: list[list[int]], tokens: list[list[int]], logits: Tensor
    ) -> None:
        dtype = self.coordinator.model.dtype
        truths, roughs, own = [], [], 0.0
        for prompt, new in zip(prompts, tokens, strict=True):
            truth, rough = (self._logits(prompt, new, kind) for kind in (torch.float64, dtype))
            own = max(own, float((rough - truth).abs().max()))
            truths.append(truth[-len(new) :])
            roughs.append(rough[-len(new) :].to(dtype))
        # Roundings grow through the layers by chance: the model's error in a few logits is one
        # draw, so the largest one along the sequences counts too.
        what = "the logits of the attached model"
        assert_as_good(logits, torch.stack(truths), torch.stack(roughs), what, slack=2 * own)

    def _logits(self, prompt: list[int], new: list[int], dtype: torch.dtype) -> Tensor:
        """Logits of the twin for every token but the first."""
        allowed = self.allowed(len(prompt), len(new))
        rest = prompt[1:] + new
        return self.bench.case.dense_logits(self.twin, prompt[:1], rest, dtype, allowed)

    def allowed(self, prompt: int, new: int) -> list[Tensor] | None:
        """Masks of what each query may attend, None where it may attend everything before it."""
        total = prompt + new - 1
        causal = torch.ones((total, total), dtype=torch.bool).tril()
        layers = []
        for path in self.coordinator.layers:
            group = path.view.group
            columns = causal.repeat(group.num_kv_heads, 1, 1)
            if path.algorithm:
                for length in range(prompt + 1, total + 1):
                    for head in range(group.num_kv_heads):
                        lane = head // group.heads_per_lane
                        units = roving_units(path.view.layer, lane, length, UNIT, group.select)
                        columns[head, length - 1] = _tokens(units, length, total)
            layers.append(columns.to(self.bench.subject.tier.device))
        return None if all(bool((each == causal.to(each)).all()) for each in layers) else layers

    def assert_all_free(self) -> None:
        """Assert that no request is left, no forward is open, and both tiers add up."""
        coordinator = self.coordinator
        slots, free = coordinator.config.max_requests, coordinator.requests.free
        assert free == slots, f"{slots - free} of {slots} request slots are still taken"
        used = coordinator.manager.host.used
        assert used == 0, f"{used} host pages are still leased"
        check_integrity(coordinator)
        coordinator.request_end(coordinator.request_begin())
        assert coordinator.requests.free == slots, "a forward is still open: requests do not end"

    def assert_evicted(self, rows: int) -> None:
        """Assert that each request loaded more units than its buffers can hold at a time."""
        most: dict[int, int] = {}
        for forward in self.watcher.ended:
            most |= forward.misses
        groups = [path.view.group for path in self.coordinator.layers]
        room = sum(group.buffer_slots * group.lane_heads for group in groups)
        assert len(most) == rows, f"{rows} requests, and slots {sorted(most)} were seen"
        assert all(misses > room for misses in most.values()), f"{most} misses, {room} slots"

    def assert_appended(self, prompts: Sequence[int], steps: int) -> None:
        """Assert that the last call appended prompts of these lengths, and a token a step."""
        lengths_of: dict[int, list[int]] = {}
        for forward in self.watcher.ended:
            for slot, length in forward.lengths.items():
                lengths_of.setdefault(slot, []).append(length)
        reported, given = sum(each.prefill_tokens for each in self.watcher.ended), sum(prompts)
        assert reported == given, f"{reported} prompt tokens were appended, expected {given}"
        # Whether the last token that is generated is appended too is up to the engine.
        seen = sorted(lengths_of.values())
        expected = [list(range(prompt + 1, prompt + steps)) for prompt in sorted(prompts)]
        assert [row[: steps - 1] for row in seen] == expected, f"lengths {seen}"
        assert all(len(row) <= steps for row in seen), f"lengths {seen} after {steps} tokens"


def _tokens(units: list[int], length: int, total: int) -> Tensor:
    """Columns of some units and of the tail unit of ``length`` tokens."""
    columns = torch.zeros(total, dtype=torch.bool)
    for unit in (*units, (length - 1) // UNIT):
        columns[unit * UNIT : min((unit + 1) * UNIT, length)] = True
    return columns
