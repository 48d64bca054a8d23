"""Nothing but kernels needs Triton: each case is a process in which it cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.packaging.packages import packages

HIDDEN = "import sys\nsys.modules['triton'] = None  # as if it were not installed\n"
COMMAND = "from topkv_cli.group import topkv\ntopkv(sys.argv[1:])\n"
NEEDED = "it needs triton: pip install triton"

SNIPPET = """
import topkv
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.retrieval import make_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
asked = make_prompt(1500)
prompt = tokenizer(asked.text, return_tensors="pt")
settings = {"algorithm": "quest", "backend": "triton_attention", "budget": 256, "max_tokens": 2048}
for more in ({}, {"pages": "prefixes", "host_format": "fp8"}):
    handle = topkv.attach(model, {**settings, **more})
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=5)[0, -5:]) == asked.expected)
    print(handle.memory().device_kv > 0)
    handle.detach()
try:
    topkv.attach(model, {**settings, "impl": "triton"})
except topkv.errors.ConfigError as refused:
    print(refused.reasons[0])
"""

FACTORIES = """
import json
from topkv.errors import PluginError
from topkv.plugins import registry

found = {}
for record in registry().records():
    for impl, path in record.entry.factories.items() if record.entry else ():
        try:
            registry().factory(record, impl)
        except PluginError as error:
            (reported,) = error.reasons
        else:
            reported = ""
        found[f"{record.package} {record.kind} {record.name} {impl}"] = reported
print(json.dumps(found))
"""


def run(code: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run code in a process without Triton, and without the variable of its interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + code, *arguments],
        capture_output=True,
        text=True,
        env=kept,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


def test_a_model_is_attached_and_generates():
    *answers, refused = run(SNIPPET).stdout.splitlines()
    assert answers == ["True"] * 4
    assert refused.startswith("impl 'triton' on cpu needs triton, which is not installed")
    assert "pip install triton, or set impl to 'reference'" in refused


@pytest.fixture(scope="module")
def factories() -> dict[str, str]:
    """Reasons why factories do not import, by package, kind, name and implementation."""
    found: dict[str, str] = json.loads(run(FACTORIES).stdout)
    return found


def test_references_import_and_kernels_say_what_they_need(factories):
    assert len(factories) > 40
    for name, reported in factories.items():
        assert not reported or (NEEDED in reported and name.endswith(" triton")), (
            f"{name}: {reported}"
        )
    hint = NEEDED + ", or set impl to 'reference'"
    assert factories["topkv-double-sparsity algorithm double_sparsity triton"].endswith(hint)


def test_a_package_declares_triton_where_nothing_of_it_runs_without(factories):
    for package in packages():
        reported = [why for name, why in factories.items() if name.split()[0] == package.name]
        lacks = bool(reported) and all(reported)
        declared = [line for line in package.project["dependencies"] if "triton]" in line]
        assert bool(declared) == lacks, f"{package.name} must ask for topkv[triton]: {lacks}"


@pytest.mark.nightly
def test_the_commands_say_that_triton_is_missing():
    assert "quest" in run(COMMAND, "plugins").stdout
    state = json.loads(run(COMMAND, "doctor", "--json").stdout)["triton"]
    assert "pip install triton" in state["version"]
    refused = run(COMMAND, "demo", "--tokens", "4096", "--impl", "triton", status=2).stderr
    assert "needs triton" in refused


@pytest.mark.nightly
def test_the_demo_runs():
    shown = run(COMMAND, "demo", "--tokens", "4096", "--json").stdout
    assert json.loads(shown)["correct"] is True


def test_the_kit_leaves_out_what_is_interpreted():
    code = "from topkv_testing.tiers import tier\nprint(tier('interpret').missing)\n"
    assert run(code).stdout == "needs triton: pip install 'topkv[triton]'\n"
