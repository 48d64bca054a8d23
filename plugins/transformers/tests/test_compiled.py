"""Decode steps whose layers are compiled: the same up to rounding, in fewer kernels."""

from __future__ import annotations

import gc
import re
import shutil
import weakref
from functools import partial, wraps
from unittest.mock import patch

import pytest
import torch
import transformers
from attrs import evolve
from model_cases import model_of
from torch._inductor.graph import GraphLowering

import topkv
from topkv.errors import CapabilityError, RequestError
from topkv_transformers import capture, compiled

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False}


class Backend:
    """A backend of ``torch.compile`` that counts graphs, and keeps none of them alive.

    Attributes:
        graphs: weak references to what was compiled.
        errors: what to raise instead, by the number of graphs before; each once.
    """

    def __init__(self):
        self.graphs = []
        self.errors = {}

    def __call__(self, graph, inputs):
        if len(self.graphs) in self.errors:
            raise self.errors.pop(len(self.graphs))
        self.graphs.append(weakref.ref(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def backend(monkeypatch):
    """Backend in place of inductor: it replaces operators by those they consist of."""
    backend = Backend()
    compiler = partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
    monkeypatch.setattr(compiled, "COMPILE", compiler)
    return backend


def generated(model, prompt, settings, steps=16):
    """Sequences and logits ``[B, steps, V]`` of greedy ``generate``, and what was captured."""
    with topkv.attach(model, settings) as handle:
        output = model.generate(
            **prompt,
            do_sample=False,
            max_new_tokens=steps,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences, torch.stack(output.logits, 1), handle.capture


def assert_near(ours, stock):
    """Compare up to roundings that differ: 1e-4 of the largest logit. A missed key is far more."""
    assert (ours - stock).abs().max() <= 1e-4 * stock.abs().max()


@pytest.mark.parametrize("pads", [(0,), (0, 21, 1)], ids=["single", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_steps_are_those_of_python(tiny, recording, backend, family, pads):
    """Layers share one graph, prompts run as they are, and a replay depends on nothing frozen."""
    model, prompt = tiny.model(family, layers=4), tiny.prompt(45, pads)
    settings = tiny.settings(**SPARSE, dense_layers=[1])
    stock, logits, _ = generated(model, prompt, settings)
    ours, ours_logits, report = generated(model, prompt, settings | recording | {"compile": True})
    assert torch.equal(ours, stock)
    assert_near(ours_logits, logits)
    assert len(backend.graphs) == 1
    assert report.replayed == 14
    assert report.compiled.keys() == report.seconds.keys() == {(len(pads), 1)}
    assert not report.uncompiled
    assert f"{len(pads)} rows compiled in " in str(report)


def test_each_number_of_rows_is_compiled_once(tiny, recording, backend):
    model = tiny.model()
    settings = tiny.settings(**SPARSE, **recording, compile=True)
    with topkv.attach(model, settings) as handle:
        for pads in ((0,), (0, 3), (0,), (2, 0)):
            model.generate(**tiny.prompt(21, pads), do_sample=False, max_new_tokens=6)
        assert len(backend.graphs) == 2
        assert handle.capture.compiled.keys() == handle.capture.seconds.keys() == {(1, 1), (2, 1)}


def test_steps_of_each_number_of_tokens_are_compiled(tiny, recording, backend):
    """Prompt lookup drafts up to three tokens; each number is a graph of its own."""
    model, prompt = tiny.model(), tiny.prompt(45)
    more = {"do_sample": False, "max_new_tokens": 40, "prompt_lookup_num_tokens": 3}
    stock = model.generate(**prompt, **more)
    settings = tiny.settings(**recording, compile=True, max_queries=4, ring_tokens=16)
    with topkv.attach(model, settings) as handle:
        for _ in range(2):
            assert torch.equal(model.generate(**prompt, **more), stock)
        shapes = handle.capture.compiled.keys()
        assert {(1, 1), (1, 4)} <= shapes <= {(1, tokens) for tokens in range(1, 5)}
        assert len(backend.graphs) == len(shapes)
        assert handle.capture.seconds.keys() <= shapes
        assert handle.capture.replayed


def test_layers_that_differ_are_compiled_one_by_one(tiny, recording, backend):
    """Such layers are more than dynamo is set to compile of one function."""
    model, prompt = tiny.model(layers=4), tiny.prompt(9)
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm.variance_epsilon = 0.1 + 0.1 * number
    stock, logits, _ = generated(model, prompt, tiny.settings(), 5)
    settings = tiny.settings(**recording, compile=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        ours, ours_logits, report = generated(model, prompt, settings, 5)
    assert torch.equal(ours, stock)
    assert_near(ours_logits, logits)
    assert len(backend.graphs) == 4
    assert not report.uncompiled


def write(model):
    model.model.layers[0].mlp.up_proj.weight.data.mul_(0.5)


def replace(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def rescale(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 10.0


@pytest.mark.parametrize(
    ("change", "graphs"),
    [(write, 1), (replace, 3), (rescale, 2)],
    ids=["write", "replace", "rescale"],
)
def test_a_changed_module_is_compiled_anew(tiny, recording, backend, change, graphs):
    """Compiling anew is done where needed: weights are no part of what is compiled."""

    def talk(settings):
        model, prompt, reported = tiny.model(), tiny.prompt(21), []
        with topkv.attach(model, settings):
            for turn in range(2):
                if turn:
                    change(model)
                output = model.generate(
                    **prompt,
                    do_sample=False,
                    max_new_tokens=6,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
                output.past_key_values.close()
                reported += output.logits
        return torch.cat(reported)

    stock = talk(tiny.settings(**SPARSE))
    ours = talk(tiny.settings(**SPARSE, **recording, compile=True))
    assert_near(ours, stock)
    assert len(backend.graphs) == graphs


@pytest.mark.parametrize("layer", [0, 1])
def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(tiny, recording, backend, layer):
    """A layer before may have appended its rows by then."""
    model, prompt = tiny.model(), tiny.prompt(21, (0, 4))
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1
    stock, logits, _ = generated(model, prompt, tiny.settings(**SPARSE))
    backend.errors[layer] = RuntimeError("no compiler")
    settings = tiny.settings(**SPARSE, **recording, compile=True)
    match = r"(?s)compiled for a decode step of 2 rows.*no compiler"
    with pytest.warns(RuntimeWarning, match=match):
        ours, ours_logits, report = generated(model, prompt, settings)
    assert torch.equal(ours, stock)
    assert torch.equal(ours_logits, logits)
    assert report.uncompiled.keys() == report.seconds.keys() == {(2, 1)}
    assert not report.compiled
    assert "2 rows not compiled: " in str(report)


def test_a_step_that_fails_before_its_misses_are_there_is_begun_again(
    tiny, recording, backend, monkeypatch
):
    model, prompt = tiny.model(), tiny.prompt(90)
    settings = tiny.settings(**SPARSE | {"budget": 16, "buffer": 20})
    stock, logits, _ = generated(model, prompt, settings)
    with topkv.attach(model, settings) as handle:
        transfer = type(handle.coordinator.layers[1].transfer)
    load, errors = transfer.load, [RuntimeError("no link")]

    @wraps(load)
    def failing(*args):
        if errors and compiled._running.get() is not None:
            raise errors.pop()
        return load(*args)

    monkeypatch.setattr(transfer, "load", failing)
    with pytest.warns(RuntimeWarning, match="no link"):
        ours, ours_logits, report = generated(
            model, prompt, settings | recording | {"compile": True}
        )
    assert torch.equal(ours, stock)
    assert torch.equal(ours_logits, logits)
    assert report.uncompiled.keys() == {(1, 1)}


def test_an_interrupt_of_the_compiler_leaves_nothing_behind(tiny, check, recording, backend):
    model, prompt = tiny.model(), tiny.prompt(21)
    stock, _, _ = generated(model, prompt, tiny.settings(**SPARSE))
    backend.errors[0] = KeyboardInterrupt()
    with topkv.attach(model, tiny.settings(**SPARSE, **recording, compile=True)) as handle:
        with pytest.raises(KeyboardInterrupt):
            model.generate(**prompt, do_sample=False, max_new_tokens=16)
        assert all("forward" not in vars(layer) for layer in model.model.layers)
        check.all_free(handle)
        ours = model.generate(**prompt, do_sample=False, max_new_tokens=16)
        assert torch.equal(ours, stock)
        assert handle.capture.compiled.keys() == {(1, 1)}
        check.all_free(handle)


def test_what_was_compiled_is_freed_and_modules_are_as_before(tiny, recording, backend):
    model, prompt = tiny.model(), tiny.prompt(21)
    before = {name: {*vars(module)} for name, module in model.named_modules()}
    settings = tiny.settings(**SPARSE, **recording, compile=True)
    with topkv.attach(model, settings) as handle:
        model.generate(**prompt, do_sample=False, max_new_tokens=6)
        assert all("forward" not in vars(layer) for layer in model.model.layers)
        gc.collect()
        assert backend.graphs[0]() is not None
    del handle
    gc.collect()
    assert backend.graphs[0]() is None
    assert {name: {*vars(module)} for name, module in model.named_modules()} == before


def test_it_is_refused_where_nothing_is_captured(tiny):
    model = tiny.model()
    model.model.rotary_emb.rope_type = "dynamic"
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(CapabilityError, match="compile: true cannot be served") as refused,
    ):
        topkv.attach(model, tiny.settings(compile=True, capture="off"))
    for part in ("the setting capture is 'off'", "'dynamic'", "TORCHDYNAMO_DISABLE"):
        assert part in str(refused.value)
    assert not hasattr(model.model, "_topkv_handle")
    with topkv.attach(model, tiny.settings()) as handle:
        latent = evolve(handle.config, model=evolve(handle.shape, attention="mla"))
        assert any("'mla'" in reason for reason in compiled.refusals(model.model, latent))


def test_compiling_from_outside_is_refused(tiny):
    model = tiny.model()
    layer = model.model.layers[0]
    hidden = torch.zeros((1, 1, 64), device=tiny.device)
    angles = torch.zeros((2, 1, 1, 64), device=tiny.device)
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(**tiny.prompt(9), past_key_values=cache)
        model.config._attn_implementation = "topkv"
        with pytest.raises(RequestError, match=r"leave torch\.compile out"):
            torch.compile(layer.forward, backend="eager")(
                hidden, past_key_values=cache, position_embeddings=angles.unbind()
            )
        model.config._attn_implementation = "sdpa"


class Rerun:
    """Records nothing, for kernels that no dispatcher sees: what it returns runs the body."""

    def __call__(self, body):
        return body


@pytest.mark.nightly
def test_inductor_fuses_what_is_between(tiny, check, recording, monkeypatch):
    """A layer is 7 products, attention, and 6 further kernels: norm, two rotations, residual with
    norm, activation, residual. Inductor times whether to pad a product, so it may not."""
    if tiny.device.type == "cpu":
        if shutil.which("g++") is None:
            pytest.skip("inductor needs a C++ compiler")
        monkeypatch.setattr(capture, "CudaRecorder", Rerun)
    model, prompt = tiny.model(layers=4), tiny.prompt(45, (0, 21, 1))
    sequences, stock, _ = check.run(model, prompt)
    truth = check.oracle(model, sequences, prompt)
    settings, codes = tiny.settings(**recording, compile=True), []
    with (
        torch._inductor.config.patch(force_disable_caches=True, shape_padding=False),
        patch.object(GraphLowering, "save_output_code", codes.append),
    ):
        ours, logits, report = generated(model, prompt, settings, 24)
    assert torch.equal(ours, sequences)
    check.close(logits.double(), stock, truth)
    assert report.compiled.keys() == {(3, 1)}
    assert report.replayed == 22
    (code,) = codes
    called = code[code.index("def call(") :]
    assert len(re.findall(r"extern_kernels\.\w+\(", called)) == 7
    assert called.count("torch.ops.topkv.attend.default(") == 1
    fused = r"(cpp_fused\w+\(|triton_\w+\.run\()"
    assert 3 <= len(re.findall(fused, called)) <= 6


@pytest.mark.parametrize("name", ["Flint", "Gemma2"])
def test_sinks_and_softcaps_are_handed_on(tiny, recording, backend, name):
    """Classes are ones whose layers slide as a rule; here all are full."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this Transformers has no {name}")
    full = ["full_attention"] * 2
    model = model_of(name, tiny.device, num_hidden_layers=2, layer_types=full)
    prompt = tiny.prompt(31, (0, 17))
    python = generated(model, prompt, tiny.settings(capture="off"))
    ours = generated(model, prompt, tiny.settings(compile=True, **recording))
    if "between CPU and CUDA" in str(ours[2]):
        pytest.skip(f"{name} of this Transformers makes a tensor on the CPU in each step")
    assert ours[2].replayed
    assert ours[2].compiled
    assert not ours[2].uncompiled
    assert torch.equal(ours[0], python[0])
    assert_near(ours[1], python[1])
