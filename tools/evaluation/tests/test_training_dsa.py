"""The recipe of the small DeepSeek-V3.2 model, at sizes of seconds."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from topkv_evaluation.retrieval import make_prompt, standard_library_text

pytestmark = pytest.mark.nightly

TRAINING = Path(__file__).parents[1] / "training"
TOPK = 8


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    precision = torch.get_float32_matmul_precision()
    sys.path.insert(0, str(TRAINING))
    try:
        parts = {n: import_module(f"dsa_{n}") for n in ("index", "model", "stages", "card")}
        parts["script"] = import_module("train_dsa")
        parts["loop"] = import_module("retrieval_loop")
        parts["base"] = import_module("retrieval_model")
        parts["batches"] = import_module("retrieval_batches")
    finally:
        sys.path.remove(str(TRAINING))
    yield SimpleNamespace(**parts)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="module")
def checkpoint(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by two processes' worth of calls: the second goes on from the first."""
    folder = tmp_path_factory.mktemp("checkpoint")
    options = ["--tiny", "--device", "cpu", "--out", str(folder), "--minutes", *["0.02"] * 3]
    recipe.script.main([*options, "--stages", "dense"])
    recipe.script.main([*options, "--stages", "warm-up", "sparse", "scores"])
    return folder


@pytest.fixture
def model(recipe: SimpleNamespace) -> Any:
    """Weights far larger than initial ones, so that attention is sharp and layers matter.

    With 16 index heads no score is exactly 0: among ties torch chooses as it likes.
    """
    torch.manual_seed(0)
    config = recipe.model.dsa_config(64, TOPK, tiny=True)
    config.index_n_heads = 16
    model = recipe.script.DeepseekV32ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


@pytest.fixture
def batch(recipe: SimpleNamespace) -> Any:
    text = standard_library_text("train")
    return recipe.batches.BatchMaker(text, torch.device("cpu"), 0)(2, 64)


def copied(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- the checkpoint


def test_saved_model_gives_the_logits_of_the_trained_weights(
    checkpoint: Path, recipe: SimpleNamespace
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    assert type(loaded).__name__ == "DeepseekV32ForCausalLM"
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.index_topk == 16
    trained = type(loaded)(recipe.model.dsa_config(384, 16, tiny=True))
    trained.load_state_dict(torch.load(checkpoint / "sparse.pt", weights_only=True))
    for parameter in trained.parameters():  # not .to(): it would round the rotary frequencies
        parameter.data = parameter.data.to(torch.bfloat16)
    tokens = torch.randint(1, 128, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = trained(tokens).logits
        assert torch.equal(loaded(tokens).logits, expected)


def test_saved_model_generates_and_names_no_layer_types(checkpoint: Path) -> None:
    # Transformers 5.17 and 5.18 have different names for the layers of V3.2.
    assert "layer_types" not in json.loads((checkpoint / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    tokens = torch.from_numpy(make_prompt(300, 2, seed=0, sinks=16).tokens.copy()).long()[None]
    assert loaded.generate(tokens, max_new_tokens=5).shape == (1, 305)


def test_full_size_stays_below_the_limits(recipe: SimpleNamespace, tmp_path: Path) -> None:
    model = recipe.script.DeepseekV32ForCausalLM(recipe.model.dsa_config(8192, 256))
    assert sum(p.numel() for p in model.parameters()) == 5_440_640 < 8_000_000
    assert not any("experts" in name for name, _ in model.named_parameters())
    recipe.base.save_checkpoint(model, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 10_000_000 < size < 16_000_000


def test_curve_has_every_stage(checkpoint: Path) -> None:
    lines = [json.loads(line) for line in (checkpoint / "curve.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(line["stage"] for line in lines)) == ["dense", "warm-up", "sparse"]
    for line in lines:
        assert all(value == value for value in line.values())
        assert 0 <= line["index_mass"] <= line["best_mass"] + 1e-6 <= 1 + 2e-6
        assert line["index_recall"] == pytest.approx(
            line["index_mass"] / line["best_mass"], abs=1e-4
        )
        assert {"step", "text_nats", "answer_nats", "exact", "sparse_exact"} < line.keys()
        assert ("index_kl" in line) == (line["stage"] != "dense")


def test_card_holds_the_figures_of_the_record(checkpoint: Path, recipe: SimpleNamespace) -> None:
    record = json.loads((checkpoint / "training.json").read_text())
    assert list(record["stages"]) == ["dense", "warm-up", "sparse"]
    assert all(stage["steps"] > 0 for stage in record["stages"].values())
    lines = record["scores"]["rows"]
    assert [(line["length"], line["topk"]) for line in lines] == [
        (length, topk) for length in (192, 384) for topk in (None, 16, 32)
    ]
    assert record["scores"]["own_forward"]["same_byte"] > 0.9
    lines[2]["prompts"]["exact"] = 0.123
    (checkpoint / "training.json").write_text(json.dumps(record))
    recipe.card.main(checkpoint)
    card = (checkpoint / "README.md").read_text()
    assert "| 192 | top-32 |" in card
    assert card.count("12.3% (2 facts, 4 prompts)") == 1
    assert str(checkpoint) not in card


# ---------------------------------------------------------------- stages


@pytest.mark.parametrize(
    ("stage", "index", "others"),
    [("dense", False, True), ("warm-up", True, False), ("sparse", True, True)],
)
def test_a_stage_keeps_a_graph_of_what_it_trains_alone(
    recipe: SimpleNamespace, model: Any, stage: str, index: bool, others: bool
) -> None:
    recipe.stages.prepare(stage, model, TOPK)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (index if "indexer" in name else others), name


def test_dense_stage_leaves_the_indexers_alone(
    recipe: SimpleNamespace, model: Any, batch: Any
) -> None:
    before, take = copied(model), recipe.stages.prepare("dense", model, TOPK)
    reports = torch.stack([take(batch, 1e-3) for _ in range(5)])
    assert reports.shape == (5, 3)
    assert reports.isfinite().all()
    assert reports[-1, 0] < reports[0, 0]
    for name, value in model.state_dict().items():
        same = torch.equal(value, before[name])
        assert same == ("indexer" in name), name


def test_warm_up_learns_and_changes_the_indexers_alone(
    recipe: SimpleNamespace, model: Any, batch: Any
) -> None:
    before, take = copied(model), recipe.stages.prepare("warm-up", model, TOPK)
    reports = torch.stack([take(batch, 1e-2) for _ in range(30)])
    assert reports.isfinite().all()
    assert reports[-1, 3] < 0.5 * reports[0, 3]
    assert torch.equal(reports[:, :3], reports[:1, :3].expand(30, -1))
    for name, value in model.state_dict().items():
        same = torch.equal(value, before[name])
        assert same == ("indexer" not in name), name


def test_sparse_stage_trains_both_parts(recipe: SimpleNamespace, model: Any, batch: Any) -> None:
    before, take = copied(model), recipe.stages.prepare("sparse", model, TOPK)
    reports = torch.stack([take(batch, 1e-3) for _ in range(10)])
    assert reports.isfinite().all()
    assert reports[-1, 0] < reports[0, 0]
    assert reports[-1, 3] < reports[0, 3]
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name


def test_neither_loss_of_the_sparse_stage_reaches_the_others_parameters(
    recipe: SimpleNamespace, model: Any, batch: Any
) -> None:
    layers = recipe.model.dsa_layers(model, TOPK, learn=True)
    index, others = recipe.model.index_parameters(model), recipe.model.other_parameters(model)
    assert len(index) + len(others) == len(list(model.parameters()))
    language, _ = recipe.stages.losses(model, batch, layers)
    language.backward()
    assert all(parameter.grad is None for parameter in index)
    assert all(parameter.grad.abs().max() > 0 for parameter in others)
    model.zero_grad(set_to_none=True)
    recipe.stages.losses(model, batch, layers)
    recipe.model.mean_loss(layers).backward()
    assert all(parameter.grad is None for parameter in others)
    assert all(parameter.grad.abs().max() > 0 for parameter in index)


def test_one_backward_pass_gives_the_gradients_of_two(
    recipe: SimpleNamespace, model: Any, batch: Any
) -> None:
    layers = recipe.model.dsa_layers(model, TOPK, learn=True)

    def gradients(*chosen: str) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        both = {"language": recipe.stages.losses(model, batch, layers)[0]}
        both["index"] = recipe.model.mean_loss(layers)
        sum(both[name] for name in chosen).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    together = gradients("language", "index")
    apart = len(gradients("language")) + len(gradients("index"))
    assert len(together) == apart == len(list(model.parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_stage_takes_steps_on_a_gpu(recipe: SimpleNamespace) -> None:
    device = torch.device("cuda")
    model = recipe.script.DeepseekV32ForCausalLM(recipe.model.dsa_config(8192, 256)).to(device)
    text = standard_library_text("train")
    batch = recipe.batches.BatchMaker(text, device, 0)(2, 2048)
    for name in recipe.stages.TRAINED:
        take = recipe.stages.prepare(name, model, 256)
        with recipe.script.attention_kernels("cuda"):
            reports = torch.stack([take(batch, 1e-3) for _ in range(20)])
        assert reports.isfinite().all(), name
        column = 3 if name == "warm-up" else 0
        assert reports[-1, column] < reports[0, column], name


# ---------------------------------------------------------------- refusals


def test_a_later_stage_needs_the_one_before(recipe: SimpleNamespace, tmp_path: Path) -> None:
    options = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--stages"]
    with pytest.raises(FileNotFoundError, match="run the stages before it"):
        recipe.script.main([*options, "warm-up"])
    with pytest.raises(SystemExit):
        recipe.script.main([*options, "sparse", "dense"])


def test_a_stage_run_again_goes_on_from_the_one_before(
    checkpoint: Path, recipe: SimpleNamespace, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    options = ["--tiny", "--device", "cpu", "--out", str(folder), "--minutes", *["0.01"] * 3]
    recipe.script.main([*options, "--stages", "warm-up"])
    dense, again = (
        torch.load(folder / f"{n}.pt", weights_only=True) for n in ("dense", "warm-up")
    )
    for name, value in dense.items():
        assert torch.equal(value, again[name]) == ("indexer" not in name), name
    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in lines} == {"dense", "warm-up"}
    assert list(json.loads((folder / "training.json").read_text())["stages"]) == [
        "dense",
        "warm-up",
    ]


def test_an_unknown_stage_is_refused(recipe: SimpleNamespace, model: Any) -> None:
    with pytest.raises(ValueError, match="dense, warm-up, sparse, got 'cold'"):
        recipe.stages.prepare("cold", model, TOPK)
