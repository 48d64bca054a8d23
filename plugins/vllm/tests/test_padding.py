"""Rows that pad a step and dummy runs, as steps that are replayed have them; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from topkv import SparseConfig, SparseCoordinator
from topkv.config import lower
from topkv.errors import DeviceMemoryError
from topkv.plugins import registry
from topkv.types import ModelShape
from topkv_vllm.memory import check_device
from topkv_vllm.session import Session

SHAPE = ModelShape(2, 4, 2, 64, torch.float32, 0.125)

PAGE, CHUNK, LONGEST = 32, 72, 128


def lowered(device="cpu"):
    settings = SparseConfig(
        algorithm="quest",
        backend="triton_attention",
        unit=8,
        budget=32,
        buffer=32,
        dense_layers=[0],
        pages="engine",
        page_tokens=PAGE,
        max_requests=4,
        max_request_tokens=LONGEST,
        max_tokens=4 * LONGEST,
    )
    return lower(
        settings, SHAPE, device=torch.device(device), registry=registry(), max_positions=LONGEST
    )


class Engine:
    """A session, and steps of it as vLLM would have them: all requests are scheduled.

    Args:
        pads: rows of padding behind those of requests, in steps that only decode.
    """

    def __init__(self, pads=0):
        self.session, self.pads = Session(lambda: [*self.step.num_scheduled_tokens]), pads
        self.session.allocate(lowered())
        self.computed, self.random = {}, torch.Generator().manual_seed(0)

    def run(self, tokens, finished=()):
        """A step of these tokens of each request, and what its layers put out of their rows."""
        new = [name for name in tokens if name not in self.computed]
        old = [name for name in tokens if name in self.computed]
        first = {name: 1 + 4 * int(name) for name in tokens}
        self.step = SimpleNamespace(
            finished_req_ids=finished,
            preempted_req_ids=None,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name,
                    prompt_token_ids=[0] * CHUNK,
                    prefill_token_ids=None,
                    block_ids=([*range(first[name], first[name] + 4)],),
                    num_computed_tokens=0,
                )
                for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old,
                resumed_req_ids=[],
                new_block_ids=[None] * len(old),
                num_computed_tokens=[self.computed[name] for name in old],
                num_output_tokens=[0] * len(old),
            ),
            num_scheduled_tokens=tokens,
        )
        outputs = self.session.run(self.step, self.execute)
        for name, count in tokens.items():
            self.computed[name] = self.computed.get(name, 0) + count
        for name in finished:
            self.computed.pop(name, None)
        return outputs

    def execute(self, step):
        tokens = sum(step.num_scheduled_tokens.values())
        count = len(step.num_scheduled_tokens)
        self.prompts = self.session.prompts()
        pads = 0 if self.prompts else self.pads
        rows = self.session.forward(count + pads, tokens + pads)
        assert rows == tokens + pads
        return [out[:tokens] for out in self.layers(rows, tokens)]

    def layers(self, rows, live):
        """All layers; rows of padding hold what would be seen anywhere."""
        outputs = []
        for layer in SHAPE.layers:
            rand = [torch.randn(live, heads, 64, generator=self.random) for heads in (4, 2, 2)]
            q, k, v = (
                torch.cat([each, torch.full((rows - live, *each.shape[1:]), 1e4)]) for each in rand
            )
            outputs.append(torch.zeros(rows, 4, 64))
            self.session.attend(layer, q, k, v, outputs[-1])
        return outputs

    def dummy(self, rows):
        """A dummy run, which leaves its forward open."""
        assert self.session.forward(rows, rows) == rows
        self.layers(rows, 0)

    def state(self):
        """Everything that is kept between steps, on both tiers, by a path of names."""
        coordinator = self.session.coordinator
        kept = [path.selector.kept() for path in coordinator.layers if path.selector]
        places = [coordinator.manager, *kept]
        found = {}
        for number, place in enumerate(places):
            collect(f"{number}", place, found)
        assert found
        return {name: tensor.clone() for name, tensor in found.items()}


def collect(name, thing, found, deep=4):
    """Tensors among the attributes of an object, and of those."""
    if isinstance(thing, torch.Tensor):
        found[name] = thing
    elif isinstance(thing, list | tuple):
        collect(name, dict(enumerate(thing)), found, deep)
    elif isinstance(thing, dict):
        for key, each in thing.items():
            collect(f"{name}.{key}", each, found, deep)
    elif deep and type(thing).__module__.startswith("topkv"):
        names = getattr(type(thing), "__slots__", ()) or vars(thing)
        held = {each: getattr(thing, each) for each in names if hasattr(thing, each)}
        collect(name, held, found, deep - 1)


def same(ones, others):
    if isinstance(ones, dict):
        assert ones.keys() == others.keys()
        return [name for name in ones if not torch.equal(ones[name], others[name])] == []
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("pads", [1, 2])
def test_padded_rows_change_nothing(pads):
    """Over steps that decode, fill units and pages, mix with a prompt, and lose a request."""
    plain, padded = Engine(), Engine(pads)
    steps = [{"0": CHUNK, "1": 33}, {"0": 1, "1": CHUNK - 33}, *[{"0": 1, "1": 1}] * 20]
    steps += [{"0": 1, "1": 1, "2": CHUNK - 1}, {"0": 1, "1": 1, "2": 1}, {"0": 1, "1": 1, "2": 1}]
    for number, tokens in enumerate(steps):
        finished = ["0"] if number == len(steps) - 1 else []
        tokens = {name: count for name, count in tokens.items() if name not in finished}
        assert same(*(engine.run(tokens, finished) for engine in (plain, padded))), number
    assert plain.session.coordinator.transfers_of().misses
    assert same(plain.state(), padded.state())
    padded.session.coordinator.check_integrity()


def test_a_dummy_run_changes_nothing():
    """Between steps; its forward is open until the next one, which goes on as if it never was."""
    plain, other = Engine(), Engine()
    for number, tokens in enumerate([{"0": CHUNK, "1": CHUNK}, *[{"0": 1, "1": 1}] * 18]):
        before = other.state()
        other.dummy(1 + number % 4)
        other.dummy(4 - number % 4)
        assert other.session.coordinator.step.slots.tolist() == [-1] * (4 - number % 4)
        assert same(before, other.state())
        assert same(plain.run(tokens), other.run(tokens))
    assert same(plain.state(), other.state())


def test_dummy_runs_of_prompts_and_before_there_is_a_coordinator_attend_to_nothing():
    assert Session(list).forward(4, 4) == 0
    assert not Session(list).prompts()
    engine = Engine()
    assert engine.session.forward(4, 16) == 0
    assert engine.session.coordinator.forward is None


def test_steps_with_prompts_are_told_from_those_that_decode():
    """A prompt of a token and the last token of a chunked one are prompts, and so is all that a
    request had when it was preempted."""
    engine = Engine()
    for tokens, prompts in [
        ({"0": CHUNK - 1}, True),
        ({"0": 1}, True),
        ({"0": 1}, False),
        ({"0": 1, "1": 1}, True),
        ({"0": 1, "1": CHUNK - 1}, True),
        ({"0": 1, "1": 1}, False),
    ]:
        engine.run(tokens)
        assert engine.prompts == prompts
        assert not engine.session.prompts(), "outside of a step"
    resumed = SimpleNamespace(
        req_id="1",
        prompt_token_ids=[0] * CHUNK,
        prefill_token_ids=[0] * (CHUNK + 1),
        block_ids=([5, 6, 7],),
        num_computed_tokens=0,
    )
    requests, none = engine.session.requests, SimpleNamespace(req_ids=[], resumed_req_ids=[])
    step = SimpleNamespace(
        finished_req_ids=[],
        preempted_req_ids=None,
        scheduled_new_reqs=[resumed],
        scheduled_cached_reqs=SimpleNamespace(
            **vars(none), new_block_ids=[], num_computed_tokens=[], num_output_tokens=[]
        ),
        num_scheduled_tokens={"1": CHUNK},
    )
    requests.schedule(step)
    assert requests.held["1"].prefill == CHUNK + 1
    assert requests.coordinator.requests.free == 2


def test_an_exception_behind_the_last_layer_drops_the_step():
    engine, beside = Engine(pads=1), Engine(pads=1)
    for tokens in ({"0": CHUNK}, *[{"0": 1}] * 7):  # the next one fills a unit
        assert same(engine.run(tokens), beside.run(tokens))
    execute = engine.execute

    def fail(step):
        execute(step)
        raise ValueError("on purpose")

    engine.execute = fail
    seed = engine.random.get_state()
    with pytest.raises(ValueError, match="on purpose"):
        engine.run({"0": 1})
    engine.execute = execute
    engine.random.set_state(seed)
    assert engine.session.coordinator.length(0) == CHUNK + 7
    for _ in range(3):
        assert same(engine.run({"0": 1}), beside.run({"0": 1}))


def test_device_memory_is_looked_at_before_it_is_taken():
    config = lowered()

    def needs(requests):
        return SparseCoordinator.required_bytes(evolve(config, max_requests=requests)).device

    check_device(config, needs(4))
    with pytest.raises(
        DeviceMemoryError, match=r"of 4 requests .* at most max_num_seqs = 3 would"
    ):
        check_device(config, needs(4) - 1)
    with pytest.raises(DeviceMemoryError, match="at most max_num_seqs = 1 would"):
        check_device(config, needs(1))
    with pytest.raises(DeviceMemoryError, match="not even one request fits"):
        check_device(config, needs(1) - 1)
