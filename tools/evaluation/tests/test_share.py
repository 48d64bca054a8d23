"""``topkv share``: patterns beside all of them, masses beside float64, and the command itself."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from topkv import attach
from topkv_cli.group import topkv
from topkv_evaluation import CHECKPOINT, DSA_CHECKPOINT
from topkv_evaluation.eval import recall
from topkv_evaluation.share import calibrate, patterns
from topkv_evaluation.share.effects import effects_of
from topkv_evaluation.share.prompts import Prompt
from topkv_evaluation.share.similarity import Decoded, Shared

LAYERS, HEADS, KV_HEADS, DIM, UNIT = 4, 4, 2, 64, 8
SETTINGS = {
    "algorithm": "quest", "backend": "triton_attention", "unit": UNIT, "budget": 5 * UNIT,
    "dense_layers": [], "max_requests": 1, "max_tokens": 256,
}  # fmt: skip


def tiny(seed=0, **options):
    """A random model whose queries and keys are far from alike."""
    torch.manual_seed(seed)
    sizes = {
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM,
        "num_key_value_heads": KV_HEADS, "hidden_size": 48, "intermediate_size": 64,
        "vocab_size": 256, "max_position_embeddings": 512, "initializer_range": 0.3,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory of such a model, its text and its settings."""
    made = tmp_path_factory.mktemp("tiny")
    tiny().save_pretrained(made)
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(made)
    lines = (f"def item_{i}(x):\n    return x * {i * i} + {i}\n" for i in range(24))
    (made / "text").write_text("".join(lines))
    (made / "settings.yaml").write_text(json.dumps({"dense_layers": [], "unit": UNIT}))
    return made


# Patterns.


def lost(losses, pattern):
    """Sum up the loss of a pattern, layer by layer."""
    total, source = 0.0, None
    for layer, part in enumerate(pattern):
        source = layer if part == "F" else source
        total += losses[source][layer]
    return total


def check_the_best_of_all_patterns_is_found():
    values = st.lists(st.integers(-9, 9), min_size=36, max_size=36)

    @given(values, st.integers(1, 6))
    def check(values, layers):
        losses = [values[6 * row : 6 * row + layers] for row in range(layers)]
        found = patterns.best_patterns(losses)
        assert len(found) == layers
        every = ["F" + "".join(rest) for rest in itertools.product("FS", repeat=layers - 1)]
        for selecting, pattern in enumerate(found, start=1):
            rivals = [each for each in every if each.count("F") == selecting]
            assert pattern in rivals
            assert lost(losses, pattern) == min(lost(losses, each) for each in rivals)

    check()


def test_the_best_of_all_patterns_is_found():
    check_the_best_of_all_patterns_is_found()


@pytest.mark.parametrize("pattern", ["FSSS", "FSFS", "FFSS", "FFFF"])
def test_a_layer_goes_by_the_layer_that_the_core_takes(pattern):
    """The ids that an attached model attends with show that."""
    model = tiny()
    with attach(model, {**SETTINGS, "share": pattern}) as handle, torch.inference_mode():
        paths = recall.watch(handle.coordinator)
        cache = handle.new_cache()
        model(torch.arange(160)[None], past_key_values=cache, logits_to_keep=1)
        recall.arm(paths, True)
        model(torch.tensor([[7]]), past_key_values=cache)
        ids = [path.backend.seen.ids for path in paths]
    sources = patterns.sources_of(pattern)
    for layer, other in itertools.combinations(range(LAYERS), 2):
        same = sources[layer] == sources[other]
        assert torch.equal(ids[layer], ids[other]) == same, (pattern, layer, other)


# Masses, beside float64.


def activations(model, tokens):
    """Run the stock model; return of each layer float64 queries ``[n, H, D]`` and keys
    ``[n, Hkv, D]`` behind RoPE, its input and what its attention adds ``[n, hidden]``."""
    seen, hooks = {}, []

    def keep(name):
        def hook(module, args, out):
            seen[name] = (out[0] if isinstance(out, tuple) else out).detach()[0]

        return hook

    for layer, block in enumerate(model.model.layers):
        attention = block.self_attn
        for name, module in (("q", attention.q_proj), ("k", attention.k_proj), ("a", attention)):
            hooks.append(module.register_forward_hook(keep((name, layer))))
    with torch.inference_mode():
        found = model(tokens, output_hidden_states=True).hidden_states
    for each in hooks:
        each.remove()
    place = torch.arange(tokens.shape[1])[None]
    cos, sin = model.model.rotary_emb(found[0], place)
    layers = []
    for layer in range(len(model.model.layers)):
        q, k = (seen[name, layer].unflatten(-1, (-1, DIM)).transpose(0, 1) for name in "qk")
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
        q, k = (each[0].transpose(0, 1).double() for each in (q, k))
        layers.append((q, k, found[layer][0].double(), seen["a", layer].double()))
    return layers


def selected(ids, tokens):
    """Return the tokens of lane ``ids [K]`` and of the newest unit, as a set."""
    units = {int(i) for i in ids if i >= 0} | {(tokens - 1) // UNIT}
    return {t for t in range(tokens) if t // UNIT in units}


def check_masses_are_those_of_float64():
    """The budget holds all, so that the stock model makes the same queries; selections are then
    replaced by random ids before masses are measured."""
    model, steps = tiny(), 3
    tokens = torch.randint(256, (1, 90), generator=torch.Generator().manual_seed(5))
    prompt = Prompt(tokens[0, :-steps].tolist(), tokens[0, -steps:].tolist(), first=1)
    ids = torch.randint(-1, 11, (LAYERS, KV_HEADS, 4), generator=torch.Generator().manual_seed(6))
    layers, found = activations(model, tokens), []
    whole = {**SETTINGS, "budget": 128, "buffer": 128}
    with attach(model, whole) as handle, torch.inference_mode():
        paths = recall.watch(handle.coordinator)
        attend = recall.WatchedBackend.attend

        def cut(self, *args):
            attend(self, *args)
            self.seen.ids = ids[[path.backend for path in paths].index(self)].int()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recall.WatchedBackend, "attend", cut)
            with effects_of(model) as effects:
                for held in calibrate._held(handle, paths, prompt):
                    found.append((held, dict(effects)))
    assert len(found) == steps - prompt.first
    for (held, effects), at in zip(found, range(88, 90), strict=True):
        for s, (q, k, x, added) in enumerate(layers):
            logits = torch.einsum("hd,thd->ht", q[at], k[: at + 1].repeat_interleave(2, 1))
            mass = (logits * DIM**-0.5).softmax(-1).view(KV_HEADS, 2, -1).mean(1)
            for f, lane in itertools.product(range(LAYERS), range(KV_HEADS)):
                own = sum(float(mass[lane, t]) for t in selected(ids[f, lane], at + 1))
                assert float(held[f, s, lane]) == pytest.approx(own, abs=1e-4), (f, s, lane)
            together = x[at] + added[at]
            cos = float(x[at] @ together / x[at].norm() / together.norm())
            assert effects[s] == pytest.approx(1 - cos, abs=1e-4)


def test_masses_are_those_of_float64():
    check_masses_are_those_of_float64()


def check_what_is_shared_is_what_loops_say():
    """Prompts have unequal lengths, and each counts as much as any other."""
    generator, prompts = torch.Generator().manual_seed(1), []
    for queries in (2, 5, 3):
        held = torch.rand((queries, 3, 3, 2), generator=generator) + 0.01
        effects = torch.rand((queries, 3), generator=generator)
        prompts.append(Decoded([*held], effects.tolist()))
    found = Shared.of(prompts)
    for f, s in itertools.product(range(3), repeat=2):
        least, mass, effect = [], [], []
        for each in prompts:
            held = [query.double().tolist() for query in each.held]
            lanes = [min(q[f][s][lane] / q[s][s][lane] for q in held) for lane in range(2)]
            least.append(sum(lanes) / 2)
            mass.append(sum(sum(q[f][s]) for q in held) / len(held) / 2)
            effect.append(sum(e[s] for e in each.effects) / len(held))
        similarity, weight = sum(least) / 3, sum(effect) / 3
        assert float(found.similarity[f, s]) == pytest.approx(similarity, rel=1e-5)
        assert float(found.mass[f, s]) == pytest.approx(sum(mass) / 3, rel=1e-5)
        assert float(found.losses()[f, s]) == pytest.approx((1 - similarity) * weight, abs=1e-5)


def test_what_is_shared_is_what_loops_say():
    check_what_is_shared_is_what_loops_say()


def test_a_mass_that_has_vanished_is_no_nan():
    found = Shared.of([Decoded([torch.zeros(2, 2, 1)], [[0.5, 0.5]])])
    assert found.losses().tolist() == [[0.5, 0.5], [0.5, 0.5]]


# The command.


def call(*args):
    return CliRunner().invoke(topkv, ["share", "--device", "cpu", *map(str, args)])


def own(folder, *args):
    sizes = ("--budget", 5 * UNIT, "--tokens", 160, "--steps", 4, "--prompts", 2)
    model = ("--model", folder, "--text", folder / "text", "--config", folder / "settings.yaml")
    return call(*model, *sizes, *args)


def test_what_it_writes_is_what_attach_takes(folder, tmp_path):
    out = tmp_path / "shared.json"
    done = own(folder, "--selecting", 2, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert shown["config"] == json.loads(out.read_text())
    assert shown["config"]["share"] == shown["patterns"][1]["share"]
    assert [each["selecting"] for each in shown["patterns"]] == [1, 2, 3, 4]
    effect, table = shown["effect"], shown["similarity"]
    losses = [
        [0.0 if value is None else (1 - value) * effect[s] for s, value in enumerate(row)]
        for row in table
    ]
    for each in shown["patterns"]:
        assert each["share"].count("F") == each["selecting"]
        assert each["loss"] * LAYERS == pytest.approx(lost(losses, each["share"]), abs=1e-5)
        assert each["mass"] * LAYERS == pytest.approx(lost(shown["mass"], each["share"]), abs=1e-5)
    assert shown["patterns"][3]["loss"] == pytest.approx(0, abs=1e-6)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with attach(model, out) as handle:
        (group,) = handle.config.groups
        pattern = shown["config"]["share"]
        assert group.selecting == tuple(i for i in range(LAYERS) if pattern[i] == "F")
        tokens = torch.arange(150)[None]
        written = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert written.shape == (1, 155)


def test_the_table_marks_what_was_asked_for(folder):
    done = own(folder, "--selecting", 3)
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(">"))
    assert line.split()[2] == "3"
    assert f'share: "{line.split()[1]}"' in done.stdout


def test_the_shipped_model_needs_nothing_else():
    """Its questions count by the queries that predict the five digits."""
    done = call("--tokens", 768, "--prompts", 2, "--budget", 128, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert (shown["layers"], shown["prompts"], shown["selecting"]) == ([2, 3, 4, 5], 2, 1)
    assert shown["config"]["share"] == "FSSS"
    assert max(shown["effect"]) > 2 * min(shown["effect"]), "its layers matter alike"


def refused(done, *words):
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_wrong_options_are_reported(folder, tmp_path):
    refused(own(folder, "--selecting", 5), "--selecting", "expected 1 to 4", "got 5")
    refused(own(folder, "--steps", 160), "--steps", "fewer than --tokens, 160")
    refused(own(folder, "--tasks", "facts"), "--tasks and --text exclude each other")
    refused(own(folder, "--tokens", 5000), "too short", "5000")
    refused(own(folder, "--tokens", 600, "--steps", 4), "--tokens", "512 positions", "got 600")
    refused(own(folder, "--out", tmp_path / "no" / "file"), "--out")
    refused(own(folder, "--text", tmp_path / "missing"), "--text", "UTF-8")
    refused(call("--tasks", "poems"), "--tasks is refused", "poems")


def test_a_model_of_words_is_calibrated_by_what_is_named(tmp_path):
    tiny(vocab_size=300).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(tmp_path)
    refused(call("--model", tmp_path), "nothing to calibrate by", "--tasks", "--text")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dense_layers": [0, 1, 2, 3]}, "all are dense"),
        ({"dense_layers": [0, 1, 3]}, "layer 2 is the only sparse one"),
        ({"layers": {"3": {"budget": 48}}}, "layers 0-2 and 3 differ"),
        ({"layers": {"0-": {"share": "FS"}}}, "leave share out"),
        ({"stages": ["residual"]}, "some layers share a selection and keep nothing"),
    ],
)
def test_layers_that_cannot_share_are_refused(folder, tmp_path, settings, why):
    pytest.importorskip("topkv_residual")
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"dense_layers": [], "unit": UNIT, **settings}))
    refused(own(folder, "--config", path), why)


def test_a_model_with_an_indexer_shares_by_itself(folder):
    pytest.importorskip("topkv_deepseek_dsa")
    text = ("--text", folder / "text", "--tokens", 160, "--steps", 4)
    done = call("--model", DSA_CHECKPOINT, *text, "--algorithm", "deepseek_dsa", "--budget", 64)
    refused(done, "says itself which layers share", "indexer")
