"""Fixtures: a package index of one test alone, for files to fetch; and scripts as modules."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from topkv_evaluation import fetched


class Index:
    """A folder of wheels that pip finds packages in, and a cache of its own.

    Attributes:
        cache: folder of fetched files.
    """

    def __init__(self, folder):
        self.folder, self.cache = folder, folder / "cache" / "topkv"

    def add(self, name, **members):
        """Write a wheel with files; return what it takes to fetch the wheel."""
        path, info = self.path(name), f"{name}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as made:
            for member, data in members.items():
                made.writestr(f"{name}/{member}", data)
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            made.writestr(f"{info}/METADATA", about)
            made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            made.writestr(f"{info}/RECORD", "")
        return fetched.Wheel(f"{name}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), 1)

    def path(self, name):
        """Return the file of a wheel."""
        return self.folder / f"{name}-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def script(request):
    """The script that a test module is about, ``scripts/SCRIPT.py``, as a module."""
    name = request.module.SCRIPT
    path = Path(__file__).parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks for its module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return Index(tmp_path)
