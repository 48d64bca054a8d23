"""A tiny random Llama in float32, and engines of SGLang that serve it: stock, and through topkv.

Most run in this process, see ``inside``, and tests that want the same one share it; what starts
processes has one to itself, see ``driver``. Where SGLang is not installed, what needs it is
skipped; ``plugins/sglang/test.sh`` runs it in an environment that has it, and skips nothing.

Where torch sees a GPU all that needs SGLang runs on it, each test with CUDA graphs and without,
and is marked ``gpu``: ``pytest -m gpu plugins/sglang``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
import torch

from plugins.sglang.tests.inside import Inside, Served
from topkv_sglang import engine_args
from topkv_sglang.versions import installed

LONGEST, CHUNK, PAGE, VOCABULARY = 512, 96, 32, 512
"""Tokens of a request, of a chunk, and of a page; ids of tokens."""

DEFAULTS = {
    "algorithm": "quest",
    "backend": "triton_attention",
    "budget": LONGEST,
    "dense_layers": [],
    "page_tokens": PAGE,
    "max_requests": 4,
    "max_tokens": 4 * LONGEST,
    "poison": True,
}
"""Settings with which everything is selected, so that tokens are those of stock SGLang."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

STOCK = {"page_size": PAGE, "max_running_requests": 4, "disable_cuda_graph": True}
STOCK["attention_backend"] = "torch_native" if DEVICE == "cpu" else "triton"
"""Arguments of stock SGLang where topkv has names of its own; these backends know float32."""

ENVIRONMENT = {"cpu": {"SGLANG_USE_CPU_ENGINE": "1"}, "cuda": {"TRITON_F32_DEFAULT": "ieee"}}
ENVIRONMENT["cuda"]["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
"""Variables by the device: SGLang's kernels of norms and rotations have no float32 on a GPU."""

ON_DEVICE = {"cpu": {"disable_cuda_graph": True}, "cuda": {"mem_fraction_static": 0.2}}
"""Arguments by the device: engines of many processes share a GPU."""

MOST = 4
"""Engines through topkv that are there at a time, on the device too."""

NEEDS_SGLANG = {"driven", "stand_ins", "needs_sglang"}

ROOT, STUBS = Path(__file__).parents[3], Path(__file__).parent / "stubs"

LACKS_KERNELS = find_spec("sgl_kernel") is None  # before the stand-ins are there


@pytest.fixture(scope="session")
def needs_sglang():
    """Skips a test without SGLang, as those that have an engine are."""


def pytest_generate_tests(metafunc):
    """Run tests with graphs and without, where there are any."""
    if "graphs" in metafunc.fixturenames:
        kinds = [False, True] if DEVICE == "cuda" else [False]
        names = ["graphs" if kind else "eager" for kind in kinds]
        metafunc.parametrize("graphs", kinds, ids=names, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    missing = not installed() and not os.environ.get("TOPKV_NEEDS_SGLANG")
    for item in items:
        needs = NEEDS_SGLANG & {*getattr(item, "fixturenames", ())}
        if needs and missing:
            reason = "SGLang is not installed; plugins/sglang/test.sh"
            item.add_marker(pytest.mark.skip(reason=reason))
        if needs and DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def save_model():
    """Saves a model: ``save_model(path, **changes)``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": LONGEST,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,  # attention that is far from uniform
    }

    def save(path, seed=0, **changes):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**sizes | changes)).float().save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="session")
def model(save_model, tmp_path_factory):
    """The folder of the model."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Environment of processes of SGLang, in which ``watch`` is a plugin of it."""
    plugin = tmp_path_factory.mktemp("plugin")
    about = plugin / "topkv_watch-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: topkv-watch\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nwatch = plugins.sglang.tests.watch:register\n"
    )
    on_cpu = DEVICE == "cpu"
    paths = [ROOT, plugin, *([STUBS] if on_cpu and LACKS_KERNELS else [])]
    more = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *more]),
        **ENVIRONMENT[DEVICE],
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def stand_ins():
    """Lets this process import SGLang on a CPU, see ``environment``."""
    if LACKS_KERNELS:
        sys.path.append(str(STUBS))
    os.environ.update(ENVIRONMENT[DEVICE], HF_HUB_OFFLINE="1")


class Driven(Served):
    """A process that obeys ``driver``.

    Args:
        environment: of it.
        log: a file for what it says.
    """

    def __init__(self, environment, log):
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plugins.sglang.tests.driver"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # SGLang ends the processes of its group when it fails
            )

    def try_(self, do, **arguments):
        """Give a command; return the answer, or the error."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the engine has ended: {self.log.read_text()[-6000:]}"
        return json.loads(line)

    def do(self, do, **arguments):
        """Give a command that must not fail; return the answer."""
        found = self.try_(do, **arguments)
        assert "error" not in found, found
        return found["answer"]

    def run(self, requests):
        """Run requests at a time; return what each got."""
        return self.do("answer", requests=requests)

    def flush(self):
        """Empty the radix cache."""
        return self.do("flush")

    def check_integrity(self):
        """Check topkv's pages and maps in the scheduler, see ``watch``."""
        self.do("check_integrity")

    def idle(self):
        """Return the state of the scheduler once nothing is left to do."""
        for _ in range(50):
            state = self.do("state")
            if not (state["watched"]["rows"] or (state["topkv"] or {}).get("requests")):
                break
            time.sleep(0.1)
        return state

    def close(self):
        """End the process, and the engine with it."""
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="session")
def driven(environment, tmp_path_factory):
    """Gives processes without an engine: ``driven(**variables)``; they live until the end."""
    made, numbers, logs = [], count(), tmp_path_factory.mktemp("logs")

    def make(**variables):
        made.append(Driven(environment | variables, logs / f"{next(numbers)}.log"))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture(scope="session")
def arguments(model):
    """Arguments that both engines get."""
    return {
        "model_path": str(model),
        "device": DEVICE,
        "dtype": "float32",
        "context_length": LONGEST,
        "chunked_prefill_size": CHUNK,
        "enable_mixed_chunk": True,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "random_seed": 0,
        "sleep_on_idle": True,  # a scheduler would look for requests without a pause
        "log_level": "info",
        **ON_DEVICE[DEVICE],
    }


@pytest.fixture(scope="session")
def inside(stand_ins, arguments):
    """Gives new engines in this process: ``inside(config, **arguments)``, without a configuration
    stock SGLang."""

    def make(config=None, **more):
        given = {**arguments, "sleep_on_idle": False, "log_level": "error", **more}
        given = {name: value for name, value in given.items() if value is not None}
        if config is not None:
            longest = given.pop("context_length")
            given = engine_args({"max_request_tokens": longest, **DEFAULTS, **config}, **given)
        return Inside(**given)

    return make


@pytest.fixture(scope="session")
def stock(inside):
    """Stock SGLang."""
    return inside(**STOCK, max_total_tokens=4 * LONGEST)


@pytest.fixture(scope="session")
def engines():
    """Engines that are there, by what was asked for; the last one was asked for last."""
    return {}


@pytest.fixture(scope="session")
def served(inside, engines, graphs):
    """Gives engines through topkv, the same to all who ask for the same:
    ``served(settings, **arguments)``."""

    def make(settings=None, **more):
        more = {**({} if graphs else {"disable_cuda_graph": True}), **more}
        settings = settings or {}
        key = json.dumps([settings, more], sort_keys=True)
        if key in engines:
            engines[key] = engines.pop(key)
            return engines[key]
        while len(engines) >= MOST:
            engines.pop(next(iter(engines))).close()
        engines[key] = inside(settings, **more)
        return engines[key]

    return make


@pytest.fixture(scope="session")
def prompt():
    """Makes prompts: ``prompt(tokens, seed)``."""

    def make(tokens, seed=0):
        random = torch.Generator().manual_seed(1000 * seed + tokens)
        return torch.randint(VOCABULARY, (tokens,), generator=random).tolist()

    return make
