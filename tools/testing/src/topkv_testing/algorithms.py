"""The conformance suite of selection algorithms.

::

    from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


    class TestQuest(AlgorithmTests):
        @pytest.fixture
        def plugin(self):
            return "quest"

        @pytest.fixture
        def options(self):
            return AlgorithmOptions(promised=lambda length, bench: {0})

The entry says what is tested: shapes by its capabilities, tiers, and by its traits what the
algorithm promises beyond the hook specs. One that says ``needs_index`` gets what a model's own
indexer makes: index keys and queries, weights, and latent rows in the ring.
"""

from __future__ import annotations

from topkv_testing.algorithm.batch import BatchTests
from topkv_testing.algorithm.correct import CorrectTests
from topkv_testing.algorithm.index import IndexTests
from topkv_testing.algorithm.kernels import KernelTests
from topkv_testing.algorithm.needles import NeedleTests
from topkv_testing.algorithm.options import AlgorithmOptions
from topkv_testing.algorithm.oracle import OracleTests
from topkv_testing.algorithm.queries import QueriesTests
from topkv_testing.algorithm.selection import SelectionTests
from topkv_testing.algorithm.state import StateTests
from topkv_testing.algorithm.sticky import StickyTests
from topkv_testing.algorithm.tokens import TokenTests

__all__ = ["AlgorithmOptions", "AlgorithmTests"]


# pytest runs the tests of the last base first: there stand those that say most of a mistake.
class AlgorithmTests(
    KernelTests,
    QueriesTests,
    CorrectTests,
    TokenTests,
    IndexTests,
    StickyTests,
    StateTests,
    BatchTests,
    NeedleTests,
    OracleTests,
    SelectionTests,
):
    """Every test of an algorithm; the fixtures ``plugin`` and ``options`` are the author's."""

    kind = "algorithm"
