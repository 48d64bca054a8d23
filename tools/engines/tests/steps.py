"""Steps of a session, as an engine would have them: all requests that it names are scheduled."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from topkv import SparseConfig
from topkv.config import lower
from topkv.plugins import registry
from topkv.types import ModelShape
from topkv_engines.requests import Requests
from topkv_engines.session import Session

SHAPE = ModelShape(2, 4, 2, 64, torch.float32, 0.125)

PAGE, CHUNK, LONGEST = 32, 72, 128
"""Tokens of a page, of a prompt, and of a request."""

COVERED = {"budget": LONGEST, "buffer": LONGEST}
"""Settings with which everything is selected."""


def lowered(device="cpu", **changes):
    settings = {
        "algorithm": "quest",
        "backend": "triton_attention",
        "unit": 8,
        "budget": 32,
        "buffer": 32,
        "dense_layers": [0],
        "pages": "engine",
        "page_tokens": PAGE,
        "max_requests": 4,
        "max_request_tokens": LONGEST,
        "max_tokens": 4 * LONGEST,
    }
    return lower(
        SparseConfig(**settings | changes),
        SHAPE,
        device=torch.device(device),
        registry=registry(),
        max_positions=LONGEST,
    )


class Plain(Requests):
    """Requests of steps that say in plain words what they do: a dict of tokens by name, and the
    names of requests that end before it. Prompts are of ``CHUNK`` tokens."""

    def schedule(self, step):
        for name in step.finished:
            self.end(name)
        for name in step.tokens:
            if name in self.held:
                self.extend(name, [], step.computed[name])
            else:
                first = 1 + 4 * int(name)
                self.begin(name, [*range(first, first + 4)], 0, CHUNK)
        self.open(step.tokens)


class Engine:
    """A session, and steps of it.

    Args:
        pads: requests of padding behind the others, in steps that only decode, and of each as many
            tokens.
        order: puts the names of a step's requests into the order of their rows.
        sinks: ``[H]`` of all layers; None for layers without.
        ahead: as of the session.
        changes: of settings.

    Attributes:
        rows: queries, keys, values and outputs of each layer and request so far, by step.
        computed: tokens of each request.
    """

    def __init__(self, pads=0, order=list, sinks=None, ahead=False, **changes):
        self.pads, self.order, self.sinks = pads, order, sinks
        self.session = Session(lambda: self.names, Plain, ahead)
        self.session.allocate(lowered(**changes))
        self.device = self.session.coordinator.config.device
        self.computed, self.rows, self.random = {}, {}, torch.Generator().manual_seed(0)

    def run(self, tokens, finished=(), rejected=None):
        """Run a step of these tokens of each request; return the outputs of its layers by row.

        ``rejected`` drafts of requests are tokens that nobody counts afterwards.
        """
        step = SimpleNamespace(finished=finished, tokens=tokens, computed=dict(self.counted()))
        outputs = self.session.run(step, self.execute)
        for name, count in tokens.items():
            kept = count - (rejected or {}).get(name, 0)
            self.computed[name] = self.computed.get(name, 0) + kept
            for layer in SHAPE.layers:
                steps = self.rows[layer, name]
                steps[-1] = tuple(part[:kept] for part in steps[-1])
        for name in finished:
            self.computed.pop(name, None)
        return outputs

    def counted(self):
        """Tokens of each request that the engine counts before a step."""
        return self.computed

    def lengths(self, names, tokens, pads):
        """Lengths on the device that a forward is given."""

    def execute(self, step):
        tokens = step.tokens
        self.names = self.order([*tokens])
        self.prompts = self.session.prompts()
        alike = len({*tokens.values()}) == 1 and not self.prompts
        padded = self.pads * tokens[self.names[0]] if alike else 0
        count, lengths = len(tokens) + self.pads, self.lengths(self.names, tokens, self.pads)
        rows = self.session.forward(count, sum(tokens.values()) + padded, lengths)
        assert rows == sum(tokens.values()) + padded
        return self.layers(tokens, self.names, padded)

    def layers(self, tokens, names, pads):
        """Run all layers; rows of padding hold numbers that would be seen anywhere."""
        outputs = {}
        for layer in SHAPE.layers:
            rows = {
                name: [torch.randn(n, heads, 64, generator=self.random) for heads in (4, 2, 2)]
                for name, n in tokens.items()  # the same in every order
            }
            q, k, v = (
                torch.cat([*(rows[name][each] for name in names), torch.full((pads, h, 64), 1e4)])
                for each, h in enumerate((4, 2, 2))
            )
            q, k, v = (each.to(self.device) for each in (q, k, v))
            out = torch.full_like(q, torch.nan)
            self.session.attend(layer, q, k, v, out, sinks=self.sinks)
            assert out.isfinite().all(), "of padding too"
            parts = out.cpu().split([*(tokens[name] for name in names), pads])
            for name, part in zip(names, parts, strict=False):
                outputs[layer, name] = part
                self.rows.setdefault((layer, name), []).append((*rows[name], part))
        return outputs

    def dummy(self, count, queries=1):
        """Do a dummy run, which leaves its forward open."""
        assert self.session.forward(count, count * queries) == count * queries
        self.layers({}, [], count * queries)

    def forget_device(self):
        """Drop a forward of all requests: what they have is read from the host again."""
        coordinator = self.session.coordinator
        coordinator.forward_begin([each.slot for each in self.session.requests.held.values()])
        coordinator.forward_abort()

    def error(self):
        """The largest difference to attention in double precision over all that was computed."""
        worst = 0.0
        for steps in self.rows.values():
            q, k, v, out = (torch.cat(each).double() for each in zip(*steps, strict=True))
            k, v = (each.repeat_interleave(2, 1) for each in (k, v))
            logits = torch.einsum("qhd,khd->hqk", q, k) * SHAPE.scale
            later = torch.ones(logits.shape[1:]).triu(1).bool()
            logits = logits.masked_fill(later, -torch.inf)
            if self.sinks is not None:
                sunk = self.sinks.double().cpu()[:, None, None].expand(-1, len(q), 1)
                logits = torch.cat([sunk, logits], dim=-1)
            shares = logits.softmax(-1)[..., -len(k) :]
            expected = torch.einsum("hqk,khd->qhd", shares, v)
            worst = max(worst, float((out - expected).abs().max()))
        return worst

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
    """Return True if tensors are alike to the bit."""
    assert ones.keys() == others.keys()
    return [name for name in ones if not torch.equal(ones[name], others[name])] == []
