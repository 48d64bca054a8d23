"""The page of tested versions agrees with what packages declare and scripts install."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from tests.packaging.packages import ROOT
from tests.versions_page import PACKAGES, _pins, _range, lines


def test_the_page_is_what_packages_declare():
    """Regenerate it with ``python -m tests.versions_page > docs/versions.md``."""
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert page == "\n".join(lines()) + "\n"


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_pinned_stands_in_its_range(name):
    """Each range has an end, so that a version beyond it can be named."""
    bounds = _range(PACKAGES[name][0], name)
    assert "<" in bounds
    assert _pins()[name] in SpecifierSet(bounds)
