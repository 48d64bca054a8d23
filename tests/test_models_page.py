"""The page of model classes agrees with the classes, their tests and the engine."""

from __future__ import annotations

import pytest
import transformers

from tests.models_page import REFUSED, lines
from tests.packaging.packages import ROOT
from topkv_transformers.classes import CLASSES

PAGE = ROOT / "docs" / "models.md"


def test_the_page_is_what_is_tested():
    """Regenerate it with ``python -m tests.models_page > docs/models.md``."""
    text = PAGE.read_text(encoding="utf-8")
    if f"Transformers {transformers.__version__} " not in text:
        pytest.skip("the page is of another release of Transformers")
    assert text == "\n".join(lines()) + "\n"


def test_no_class_is_both_served_and_refused():
    served = [name for names in CLASSES.values() for name in names]
    assert len(served) == len(set(served))
    assert not set(served) & set(REFUSED)
