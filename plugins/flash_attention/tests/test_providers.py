"""Recognition of libraries, by presence and signatures alone; nothing is computed here."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from attrs import evolve

from topkv.types import GroupShape, ModelShape
from topkv_flash_attention import providers
from topkv_flash_attention.hopper import SETTLED, FlashAttention3

MODEL = ModelShape(1, 32, 8, 128, torch.bfloat16, 128**-0.5)
GROUP = GroupShape(*((0,), 16, 8, 1, 128, torch.bfloat16, 64, 2, 256, 64, 128, 4))
LATENT = ModelShape(1, 128, 1, 576, torch.bfloat16, 576**-0.5, "mla", 512)
HOPPER = (9, 0)

# Operators live as long as this.
OPERATORS = torch.library.Library("topkv_test_fa3", "FRAGMENT")
HEAD = (
    "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
)
# Argument for argument what the two builds register.
SCHEMAS = {
    "vllm": HEAD + "float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, "
    "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k",
    "upstream": HEAD + "float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, "
    "float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0",
}


def operator(name, arguments):
    """An operator of that schema, without a kernel."""
    if not hasattr(torch.ops.topkv_test_fa3, name):
        OPERATORS.define(f"{name}({arguments}) -> Tensor[]")
    return getattr(torch.ops.topkv_test_fa3, name).default


@pytest.fixture
def nowhere(monkeypatch):
    """No place holds anything."""
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        pytest.skip("the library of vLLM is loaded, and stays so")
    monkeypatch.delenv(providers.LIBRARY, raising=False)
    for name in ("flash_attn_interface", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


def offer(monkeypatch, name, **functions):
    """Install a module that offers functions, and the packages that it is in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:depth]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for function, value in functions.items():
        setattr(module, function, value)


def test_an_empty_machine_is_described_place_by_place(nowhere):
    lines = providers.describe()
    assert [line.partition(":")[0] for line in lines] == list(providers.BUILDS.loads)
    assert all("not installed" in line for line in lines)
    assert providers.LIBRARY in lines[1]


def test_a_library_file_that_is_none(nowhere, tmp_path):
    nowhere.setenv(providers.LIBRARY, str(tmp_path / "absent.so"))
    assert "there is no such file" in providers.describe()[1]
    (tmp_path / "text.so").write_text("no library")
    nowhere.setenv(providers.LIBRARY, str(tmp_path / "text.so"))
    assert f"{tmp_path / 'text.so'} does not load: OSError" in providers.describe()[1]


def test_the_library_of_an_installed_vllm_is_found_without_importing_it(nowhere, tmp_path):
    nowhere.delitem(sys.modules, "vllm")
    nowhere.syspath_prepend(tmp_path)
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert "no _vllm_fa3_C*.so" in providers.describe()[1]
    (folder / "_vllm_fa3_C.abi3.so").write_text("no library")
    line = providers.describe()[1]
    assert "vllm_flash_attn/_vllm_fa3_C.abi3.so does not load: OSError" in line
    assert "vllm" not in sys.modules


def test_packages_that_do_not_import_say_why(nowhere, tmp_path):
    nowhere.syspath_prepend(tmp_path)
    nowhere.delitem(sys.modules, "flash_attn_interface")
    source = tmp_path / "flash_attn_interface.py"
    source.write_text("raise ImportError('undefined symbol: x\\nmore')")
    assert providers.describe()[0].endswith("ImportError: undefined symbol: x")
    source.write_text("import topkv_no_such_module")
    assert "it needs topkv_no_such_module" in providers.describe()[0]


def test_a_package_without_the_operator_is_passed_over(nowhere):
    """Early builds of FlashAttention-3 had functions of C++ alone."""
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        pytest.skip("FlashAttention-3 is installed")
    offer(nowhere, "flash_attn_interface")
    assert providers.describe()[0] == "flash_attn_interface: it registers no operator fwd"


@pytest.mark.parametrize("build", SCHEMAS)
def test_each_schema_gets_its_arguments_in_order(build):
    op = operator(f"fwd_{build}", SCHEMAS[build])
    library = FlashAttention3.of(build, op)
    names = [argument.name for argument in op._schema.arguments]
    given = {"q": "Q", "page_table": "T", "softmax_scale": 0.5, "is_causal": True}
    required = dict.fromkeys(("k", "v", "seqused_k", "max_seqlen_q", "max_seqlen_k"), "?")
    got = evolve(library, op=lambda *values: values).call(**given, **required)
    assert len(got) == len(names)
    for name, value in zip(names, got, strict=True):
        assert value == {**SETTLED, **required, **given}[name], name


def test_schemas_that_cannot_be_called_are_refused():
    narrow = SCHEMAS["upstream"].replace("Tensor? page_table, ", "").replace("k_new", "newer")
    with pytest.raises(ValueError, match=r"no argument page_table.*newer that is unknown"):
        FlashAttention3.of("narrow", operator("fwd_narrow", narrow))
    grown = SCHEMAS["upstream"] + ", int extra=3"
    library = FlashAttention3.of("grown", operator("fwd_grown", grown))
    assert library.settled["extra"] == 3


def first(model, group, capability):
    """The first build that serves, and why those before it do not."""
    return providers.BUILDS.first(lambda build: build.refusals(model, group, capability))


def test_the_first_that_serves_is_taken(nowhere):
    def offered(name):
        return lambda: FlashAttention3.of(name, operator("fwd_offered", SCHEMAS["vllm"]))

    builds = evolve(providers.BUILDS, loads={"one": offered("a"), "two": offered("b")})
    nowhere.setattr(providers, "BUILDS", builds)
    library, tried = first(MODEL, GROUP, HOPPER)
    assert (library.name, tried) == ("a", [])
    library, tried = first(MODEL, GROUP, (8, 0))
    assert library is None
    assert [each.partition(":")[0] for each in tried] == ["one", "two"]
    assert "capability 9.0, got 8.0" in tried[0]


def test_what_it_refuses():
    hopper = FlashAttention3.of("x", operator("fwd_refusing", SCHEMAS["vllm"]))
    assert hopper.refusals(MODEL, GROUP, HOPPER) == []
    assert hopper.refusals(LATENT, GROUP, HOPPER) == []
    assert "9.0, got 10.0" in hopper.refusals(MODEL, GROUP, (10, 0))[0]
    assert "up to 256, got 257" in hopper.refusals(evolve(MODEL, head_dim=257), GROUP, HOPPER)[0]
    narrow = evolve(LATENT, head_dim=288, value_dim=256)
    assert "512 + 64" in hopper.refusals(narrow, GROUP, HOPPER)[0]
