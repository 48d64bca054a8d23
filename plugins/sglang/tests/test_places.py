"""Places of SGLang that are overridden, hooked or read stand in the page of the package."""

from __future__ import annotations

from pathlib import Path

from topkv_engines.places import table
from topkv_sglang.places import LATENT_PLACES, PLACES

README = Path(__file__).parents[1] / "README.md"


def test_the_page_of_the_package_has_the_tables():
    assert table(PLACES) in README.read_text()
    assert table(LATENT_PLACES) in README.read_text()
