"""``examples/serve``: options and metrics are those that there are, and the page shows them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from topkv_engines.counts import COUNTERS, GAUGES
from topkv_engines.serve import serve
from topkv_vllm.serve import SERVER
from topkv_vllm.versions import installed

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "serve"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
SERVICE = COMPOSE["services"]["topkv"]


def started():
    """Command line that the service would start."""
    result = CliRunner().invoke(serve, [*SERVICE["command"], "--engine", "vllm", "--dry-run"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_service_starts_with_options_that_there_are():
    """Options of the command are in its help; the next test asks vLLM for all others."""
    reported = CliRunner().invoke(serve, ["--help"]).output
    line, model = started(), SERVICE["command"][0]
    assert line[2:5] == ["vllm.entrypoints.openai.api_server", "--model", model]
    options = [text.partition("=")[0] for text in SERVICE["command"][1:]]
    passed = {text.partition("=")[0] for text in line[5:] if text.startswith("--")}
    ours = [name for name in options if name not in passed]
    assert ours == ["--algorithm", "--backend", "--budget", "--max-tokens"]
    assert all(re.search(rf"^ +{name} ", reported, re.MULTILINE) for name in ours)
    config = json.loads(line[line.index("--additional-config") + 1])["topkv"]
    assert config == {
        "algorithm": "quest",
        "backend": "triton_attention",
        "budget": 2048,
        "max_tokens": 262144,
    }


def test_vllm_knows_all_that_is_passed_on():
    if not installed():
        pytest.skip("vLLM is not installed; plugins/vllm/test.sh")

    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser()).parse_args(started()[3:])
    assert (known.max_num_seqs, known.max_model_len, known.port) == (8, 32768, 8000)
    assert known.served_model_name == ["local"]
    assert known.shutdown_timeout == 60


def test_its_volumes_ports_and_packages_fit_together():
    (target,) = PROMETHEUS["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == "topkv:8000"
    assert "--port=8000" in SERVICE["command"]
    mounted = COMPOSE["services"]["prometheus"]["volumes"][0].split(":")
    assert (FOLDER / mounted[0]).is_file()
    assert SERVICE["volumes"][0].endswith(":/model:ro")
    for name in ("quest", "triton-attention", "vllm"):
        assert f"topkv-{name}" in SERVICE["build"]["dockerfile_inline"]
    grace = int(SERVICE["stop_grace_period"].removesuffix("s"))
    timeout = next(text for text in SERVICE["command"] if "shutdown" in text)
    assert grace > int(timeout.partition("=")[2])


def metrics_of_the_source():
    """Names under which vLLM shows them."""
    counters = {f"vllm:topkv_{name}_total" for name in COUNTERS}
    return counters | {f"vllm:topkv_{name}" for name in GAUGES}


def test_what_is_kept_are_all_metrics_of_topkv():
    (rule,) = PROMETHEUS["scrape_configs"][0]["metric_relabel_configs"]
    assert (rule["source_labels"], rule["action"]) == (["__name__"], "keep")
    made = metrics_of_the_source()
    assert len(made) == 6
    assert all(re.fullmatch(rule["regex"], name) for name in made)
    named = re.findall(r"topkv_[a-z_]+", rule["regex"])
    assert {f"vllm:{name}" for name in named} == made


def test_the_page_shows_both_files():
    page = (ROOT / "docs" / "serve.md").read_text("utf-8")
    for name in ("compose.yaml", "prometheus.yml"):
        assert f"```text\n{(FOLDER / name).read_text('utf-8')}```" in page, name
    for name in metrics_of_the_source():
        assert f"`{name}`" in page, name


def options_of(words):
    """Values by option; JSON is decoded."""
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    return {name: json.loads(each) if "{" in each else each for name, each in pairs.items()}


def test_the_command_line_of_the_page_is_what_the_command_writes():
    page = (ROOT / "docs" / "serve.md").read_text("utf-8")
    (shown,) = re.findall(r"\$ vllm serve MODEL (.*?)```", page, re.DOTALL)
    shown = options_of(shlex.split(shown.replace("\\\n", " ")))
    settings = shown["--additional-config"]["topkv"]
    worker = shown["--worker-cls"]  # that of a CPU, wherever this runs
    line = SERVER.command_line("MODEL", settings, ["--max-num-seqs", "8", "--worker-cls", worker])
    assert options_of(line[5:]) == shown
