"""Plugin of pytest: tiers, the mark ``gpu``, how to replay a failure, and ``--compile-for``.

Suites are parametrized here, so that a test reads ``test_x[cpu]`` and ``-m gpu`` selects. Nothing
of torch is imported unless a suite is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from topkv import __version__
from topkv.entries import HOOK_API


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("topkv").addoption(
        "--compile-for",
        type=int,
        metavar="CAPABILITY",
        help="hand what the interpreter launches to the compiler for a CUDA device too, 90 say, "
        "as far as TTIR; needs none",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    capability = config.getoption("--compile-for")
    if capability is not None:
        from topkv_testing.compiling import CompilingPlugin

        config.pluginmanager.register(CompilingPlugin(capability))


def _is_kit_test(cls: type | None) -> bool:
    kit = sys.modules.get("topkv_testing.kit")
    return kit is not None and cls is not None and issubclass(cls, kit.KitTests)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tier" in metafunc.fixturenames and _is_kit_test(metafunc.cls):
        from topkv_testing.fixtures import TIERS

        metafunc.parametrize("tier", TIERS)


def pytest_report_header(config: pytest.Config) -> Sequence[str]:
    if "torch" not in sys.modules:
        return []
    import torch

    from topkv_testing.tiers import all_tiers

    states = [
        f"{tier.name} ({tier.missing})" if tier.missing else tier.name for tier in all_tiers()
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    hook_api = ".".join(map(str, HOOK_API))
    return [
        f"topkv: {__version__}, hook API {hook_api}, torch {torch.__version__}, {device}",
        f"topkv tiers: {', '.join(states)}",
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and _is_kit_test(getattr(item, "cls", None)):
        profile = os.environ.get("HYPOTHESIS_PROFILE")
        setting = f"HYPOTHESIS_PROFILE={profile} " if profile else ""
        report.sections.append(("how to replay", f"{setting}python -m pytest '{item.nodeid}'"))
    return report
