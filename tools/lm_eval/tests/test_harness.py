"""The harness with the model ``topkv`` beside its own ``hf``, on a task in files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from topkv.errors import ConfigError

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install lm-eval")
from topkv_evaluation.tasks.words import haystack  # noqa: E402
from topkv_lm_eval import register  # noqa: E402

GENERATE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}\\nWhat comes next?"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{do_sample: false, max_gen_toks: 12, until: ["."]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}\\nWhat comes next?"
doc_to_choice: ["it waits", "a step reads its keys", "nothing"]
doc_to_target: 1
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLL = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: word_perplexity, higher_is_better: false}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama of two layers with a tokenizer of 400 tokens."""
    target = tmp_path_factory.mktemp("model") / "llama"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(haystack(10_000), trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(target)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 400}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    more = {"initializer_range": 0.3, "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, **more)).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tasks of three kinds over the same four lines."""
    where = tmp_path_factory.mktemp("tasks")
    data = where / "data.jsonl"
    text = haystack(2_000)
    lines = [
        {"context": " ".join(text[i * 9 : i * 9 + 6 + 3 * i]), "answer": text[-i - 1][:60]}
        for i in range(4)
    ]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    for name, form in (("made", GENERATE), ("chosen", CHOOSE), ("rolled", ROLL)):
        (where / f"{name}.yaml").write_text(form.format(name=name, data=data), encoding="utf-8")
    return where


def evaluate(model, arguments, tasks, *names, **options):
    from lm_eval.tasks import TaskManager

    register()
    return lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[*names], device="cpu", log_samples=True,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0, **options,
    )  # fmt: skip


def through(folder, **more):
    arguments = {"pretrained": folder, "algorithm": "quest", "backend": "triton_attention",
                 "budget": 2048, "buffer": 2048, "dense_layers": "no", **more}  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in arguments.items())


def responses(results, name):
    return [sample["resps"] for sample in sorted(results["samples"][name], key=_place)]


def _place(sample):
    return sample["doc_id"]


@pytest.fixture(scope="module")
def stock(folder, tasks):
    given = f"pretrained={folder},dtype=float32"
    return evaluate("hf", given, tasks, "made", "chosen", "rolled", batch_size=2)


@pytest.mark.parametrize("question", ["line", "dense", 5])
def test_a_budget_of_everything_gives_the_numbers_of_the_stock_model(
    folder, tasks, stock, question
):
    names = ("made", "chosen") + (("rolled",) if question == "line" else ())
    given = through(folder, question=question)
    ours = evaluate("topkv", given, tasks, *names, batch_size=3)
    assert responses(ours, "made") == responses(stock, "made")
    assert len({str(each) for each in responses(stock, "made")}) > 1
    for mine, theirs in zip(responses(ours, "chosen"), responses(stock, "chosen"), strict=True):
        for [(likely, greedy)], [(expected, best)] in zip(mine, theirs, strict=True):
            assert (float(likely), greedy) == (pytest.approx(float(expected), abs=1e-3), best)
    for name, metric in (("made", "exact_match,none"), ("chosen", "acc,none")):
        assert ours["results"][name][metric] == stock["results"][name][metric]
    if "rolled" in names:
        metric = "word_perplexity,none"
        assert ours["results"]["rolled"][metric] == pytest.approx(
            stock["results"]["rolled"][metric], rel=1e-3
        )


def test_a_small_budget_gives_others(folder, tasks, stock):
    ours = evaluate("topkv", through(folder, budget=32, buffer=64), tasks, "chosen")

    def scores(results):
        return [float(each[0][0]) for sample in responses(results, "chosen") for each in sample]

    apart = [abs(m - t) for m, t in zip(scores(ours), scores(stock), strict=True)]
    assert max(apart) > 0.05, apart


def test_wrong_arguments_are_one_error(folder):
    from topkv_lm_eval.model import TopkvLM

    with pytest.raises(ConfigError) as caught:
        TopkvLM(str(folder), question="all", batch_size="many", dtype="int3")
    for words in ("question: expected line", "batch_size: expected", "dtype: expected"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="no such directory"):
        TopkvLM("absent", backend="triton_attention")


def test_dense_layers_reach_the_configuration(folder):
    """The harness makes None of ``none`` and a number of ``1``."""
    from lm_eval.utils import simple_parse_args_string

    from topkv_lm_eval.model import TopkvLM

    common = f"pretrained={folder},algorithm=quest,backend=triton_attention"
    for words, layers in (("no", ()), ("1", (1,)), ("0-1", (0, 1)), ("none", None)):
        given = simple_parse_args_string(f"{common},dense_layers={words}")
        assert TopkvLM(**given).decoder.settings.get("dense_layers") == layers


def test_sampling_and_lengths_are_refused(folder, tasks):
    for options, words in (
        ("do_sample=true,temperature=0.7", "decodes greedily"),
        ("max_gen_toks=5000", "the model has 1024 positions"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate("topkv", through(folder), tasks, "made", gen_kwargs=options)


def test_long_prompts_lose_their_beginning(folder):
    from topkv_lm_eval.model import TopkvLM

    model = TopkvLM(str(folder), algorithm="quest", backend="triton_attention", max_length=40)
    tokens = list(range(2, 100))
    for question, sparse in (("dense", 0), (7, 7), (500, 19)):
        model.question = question
        context, asked = model._asked("no line", tokens, 20)
        assert list(context + asked) == tokens[-20:]
        assert len(asked) == sparse
    model.question = "line"
    text = "The first line.\nThe second one, which is asked."
    context, asked = model._asked(text, model.tok_encode(text), 400)
    assert model.tokenizer.decode(asked) == "\nThe second one, which is asked."
    assert model.tokenizer.decode(context).endswith("The first line.")


@pytest.mark.nightly
def test_the_command_knows_the_model(folder, tasks, tmp_path):
    command = [sys.executable, "-m", "topkv_lm_eval", "run", "--model", "topkv"]
    command += ["--model_args", through(folder), "--tasks", "chosen", "--device", "cpu"]
    command += ["--include_path", str(tasks), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(written.read_text(encoding="utf-8"))
    assert found["results"]["chosen"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)
