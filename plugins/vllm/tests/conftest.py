"""A tiny random Qwen3 in float32, and engines of vLLM that serve it: stock, and through topkv.

All run in the process of the tests, side by side, and live until the last test: an engine takes
seconds to start, so tests that want the same one share it. Where vLLM is not installed, what needs
it is skipped; ``plugins/vllm/test.sh`` runs it in an environment that has it, and skips nothing.

Where torch sees a GPU all that needs vLLM runs on it, each test with CUDA graphs and without, and
is marked ``gpu``: ``pytest -m gpu plugins/vllm``.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from itertools import count
from types import MappingProxyType

import pytest
import torch

from topkv_testing.integrity import check_integrity
from topkv_vllm import engine_args
from topkv_vllm.versions import TESTED, installed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VERSION = TESTED[DEVICE][-1]

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRITON_F32_DEFAULT": "ieee",  # stock vLLM's kernels too, so that tokens can be compared
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks are bound to a NUMA node each if there are some
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a GPU that is in use here cannot be forked
}

LONGEST, CHUNK, PAGE, VOCABULARY = 512, 96, 32, 512
"""Tokens of a request, of a step, and of a page; ids of tokens."""

STOCK = {"block_size": PAGE, "max_num_seqs": 4}
"""Arguments of stock vLLM where topkv has names of its own; one of its backends knows float32."""

if DEVICE == "cuda":
    STOCK["attention_backend"] = "TRITON_ATTN"


@pytest.fixture(scope="session")
def beside():
    """Arguments that only stock vLLM gets."""
    return STOCK


@pytest.fixture(scope="session")
def version():
    """A version that was tested on this device."""
    return VERSION


@pytest.fixture(scope="session")
def needs_vllm():
    """Skips a test without vLLM, as those that have an engine are."""


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
"""Settings with which everything is selected, so that tokens are those of stock vLLM."""

NEEDS_VLLM = {"served", "stock", "save_model", "server", "needs_vllm"}


ON_GPU = {
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 2**27,
    "async_scheduling": False,  # steps of these tests are counted
}
"""Arguments on a GPU: many engines share it."""


def pytest_generate_tests(metafunc):
    """Run tests with graphs and without, where there are any, and with steps that are scheduled
    before it is known which drafts of the last one are kept."""
    if "graphs" in metafunc.fixturenames:
        kinds = [False, True] if DEVICE == "cuda" else [False]
        names = ["graphs" if kind else "eager" for kind in kinds]
        metafunc.parametrize("graphs", kinds, ids=names, scope="session")
    if "ahead" in metafunc.fixturenames:
        kinds = [False, True] if DEVICE == "cuda" else [False]
        metafunc.parametrize("ahead", kinds, ids=["ahead" if kind else "known" for kind in kinds])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    missing = not installed() and not os.environ.get("TOPKV_NEEDS_VLLM")
    for item in items:
        if NEEDS_VLLM & {*item.fixturenames} and missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; plugins/vllm/test.sh"))
        if NEEDS_VLLM & {*item.fixturenames} and DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def save_model():
    """Saves a model: ``save_model(path, **changes)``, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": LONGEST,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.2,  # attention that is far from uniform
    }
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [a + b for a in letters[:16] for b in letters[:16]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    reported = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)

    def save(path, seed=0, **changes):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**sizes | changes)).float().save_pretrained(path)
        reported.save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="session")
def model(save_model, tmp_path_factory):
    """The folder of the model."""
    return save_model(tmp_path_factory.mktemp("model"))


class Served:
    """One engine of vLLM.

    Args:
        arguments: of ``vllm.LLM``.

    Attributes:
        tokens: generated by each request so far, by sample.
        outputs: of vLLM, the last of each request.
        preempted: how many times a request of it was preempted.
    """

    _numbers = count()

    def __init__(self, **arguments):
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.tokens, self.outputs, self.preempted = {}, {}, 0

    def add(self, name, prompt, tokens=16, **options):
        """Hand over a request."""
        from vllm import SamplingParams

        options = {"temperature": 0, "detokenize": False, "ignore_eos": True, **options}
        how = SamplingParams(max_tokens=tokens, **options)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, how)

    def step(self):
        """Run one step of the engine."""
        before = {name: each.num_preemptions for name, each in self.scheduler.requests.items()}
        for output in self.engine.step():
            self.outputs[output.request_id] = output
            for one in output.outputs:  # those of its samples that have a new token
                samples = self.tokens.setdefault(output.request_id, {})
                samples[one.index] = [*one.token_ids]
        for name, request in self.scheduler.requests.items():
            self.preempted += request.num_preemptions - before.get(name, 0)

    def steps(self, number):
        """Run some steps."""
        for _ in range(number):
            self.step()

    def preempt(self):
        """Preempt all that run, which the next step resumes."""
        running = [*self.scheduler.running]
        assert running
        self.engine.reset_prefix_cache(reset_running_requests=True)
        assert all(request.num_preemptions for request in running)

    def run(self):
        """Run steps until every request has ended, and the worker knows."""
        while self.engine.has_unfinished_requests():
            self.step()
        self.engine.step()
        return self.tokens

    def answer(self, prompts, tokens=16, **options):
        """Generate by one request for each prompt; ``tokens`` of each, or of all alike."""
        names = [f"answer-{next(self._numbers)}" for _ in prompts]
        many = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        for name, prompt, most in zip(names, prompts, many, strict=True):
            self.add(name, prompt, most, **options)
        self.run()
        return [
            [samples[index] for index in sorted(samples)]
            for samples in map(self.tokens.get, names)
        ]

    @property
    def session(self):
        """The session of the worker, where topkv serves."""
        (session,) = self.llm.collective_rpc(lambda worker: worker.session)
        return session

    @property
    def coordinator(self):
        """The coordinator of the worker, where topkv serves."""
        return self.session.coordinator

    def check_nothing_is_held(self):
        """Pages add up, and no request holds one."""
        coordinator = self.coordinator
        check_integrity(coordinator)
        assert coordinator.manager.host.used == 0
        assert coordinator.requests.free == coordinator.config.max_requests
        assert not self.session.requests.held
        assert not self.session.requests.prompts

    def close(self):
        self.engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def arguments(model):
    """Arguments that both engines get."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": LONGEST,
        "max_num_batched_tokens": CHUNK,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **(ON_GPU if DEVICE == "cuda" else {}),
    }


def graph_of_all():
    """A graph in the pool of memory that all engines of a process share: when the last graph of a
    pool has ended, PyTorch captures no other one into it."""
    from vllm.platforms import current_platform

    graph, pool = torch.cuda.CUDAGraph(), current_platform.get_global_graph_pool()
    with torch.cuda.graph(graph, pool):
        torch.zeros(1, device=DEVICE)
    return graph


def plain_dict_of(value):
    """The attributes of an object, also where its class answers to every name."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict | MappingProxyType) else {}


@pytest.fixture(scope="session")
def engines():
    """Engines that are there, by what was asked for. One that is closed or fails would end the
    process groups that vLLM shares between all of a process; here it leaves them alone."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda *_, **__: None)
        if find_spec("vllm.triton_utils.dispatcher"):
            # vLLM 0.32 looks into all modules when it begins an engine, and fails at llvmlite's,
            # which an engine before it that looks up drafts has imported.
            name = "vllm.triton_utils.dispatcher.vars"
            patch.setattr(name, plain_dict_of, raising=False)
        held = graph_of_all() if DEVICE == "cuda" else None
        yield made
        del held
        for engine in made.values():
            engine.close()


@pytest.fixture(scope="session")
def make_served():
    """Makes an engine of vLLM of given arguments."""
    return Served


@pytest.fixture(scope="session")
def stock(engines, arguments):
    """Stock vLLM."""
    engines["stock"] = Served(**arguments, **STOCK)
    return engines["stock"]


@pytest.fixture
def served(engines, arguments, graphs):
    """Gives engines through topkv: ``served(settings, **arguments)``, the same to all who ask for
    the same; ``fresh`` ones are of this test alone."""
    own = []

    def make(settings=None, fresh=False, **more):
        settings = {**DEFAULTS, **(settings or {})}
        more = {**arguments, "enforce_eager": not graphs, **more}
        key = json.dumps([settings, more], sort_keys=True)
        if fresh or key not in engines:
            engine = Served(**engine_args(settings, **more))
            if fresh:
                own.append(engine)
                return engine
            engines[key] = engine
        engines[key].tokens, engines[key].preempted = {}, 0
        return engines[key]

    yield make
    for engine in own:
        engine.close()


@pytest.fixture
def prompt():
    """Makes prompts: ``prompt(tokens, seed)``."""

    def make(tokens, seed=0):
        random = torch.Generator().manual_seed(1000 * seed + tokens)
        return torch.randint(VOCABULARY, (tokens,), generator=random).tolist()

    return make
