"""Installed packages that were never tested, by the ranges in the metadata of a package."""

from __future__ import annotations

from importlib import metadata

import pytest

from topkv_authoring.tested import never_tested

RANGES = [
    "transformers<5.25,>=5.17",
    "torch>=2.11",
    'torch<2.14; extra == "tested"',
    "numpy>=1.26",
    "pluggy[dev] (>=1.5,<2)",
    "absent<3",
]


def installed(monkeypatch, **versions):
    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    def requires(name):
        version(name)
        return RANGES

    monkeypatch.setattr("topkv_authoring.tested.metadata.version", version)
    monkeypatch.setattr("topkv_authoring.tested.metadata.requires", requires)
    return never_tested("engine")


def test_versions_within_their_ranges_are_not_named(monkeypatch):
    versions = {"transformers": "5.24.3", "torch": "2.13.0+cpu", "numpy": "9.0", "pluggy": "1.6"}
    assert installed(monkeypatch, engine="0.1", **versions) == []
    assert installed(monkeypatch, **versions) == []  # the package itself is on the path alone


@pytest.mark.parametrize(
    ("name", "version", "ran"),
    [
        ("transformers", "5.25.0", "<5.25,>=5.17"),
        ("transformers", "5.25.0.dev0", "<5.25,>=5.17"),
        ("transformers", "5.16.1", "<5.25,>=5.17"),
        ("torch", "2.14.0a0+git1", "<2.14,>=2.11"),
        ("torch", "nightly of today", "<2.14,>=2.11"),
        ("torch", "10.1", "<2.14,>=2.11"),
        ("pluggy", "2.0.0", "<2,>=1.5"),
    ],
)
def test_others_are_named_with_what_tests_ran_with(monkeypatch, name, version, ran):
    (said,) = installed(monkeypatch, engine="0.1", **{name: version})
    assert said == (
        f"{name} {version} was never tested with engine 0.1, whose tests ran with {ran}"
    )
