"""The conformance suite of stages.

::

    from topkv_testing.stages import StageOptions, StageTests


    class TestRerank(StageTests):
        @pytest.fixture
        def plugin(self):
            return "rerank"

        @pytest.fixture
        def options(self):
            return StageOptions(oracle=scores)

A stage is tested behind an algorithm (``topkv_testing.models.stage_doubles.Offered``), as the core
has it. The two together are an algorithm, so that most tests are those of algorithms: form, batch,
state, kernels and capture. Tests of stages alone are in ``topkv_testing.stage``.

A stage that stands for an option of attention and refines nothing goes through ``OptionTests``
instead, of whose options ``params`` alone counts.

The options are those of algorithms and a few more. The author gives formulas in
float64: ``oracle`` for the scores of which the stage leaves the best, ``left`` for the units left
by a stage that drops some, ``estimate`` for what ``correct`` adds, and ``worth`` for the scores of
``keep``. Pools have the names that the core gives them, ``"stages[0].NAME"``, in ``by_key``.
"""

from __future__ import annotations

from topkv_testing.algorithm.batch import BatchTests
from topkv_testing.algorithm.correct import CorrectTests
from topkv_testing.algorithm.kernels import KernelTests
from topkv_testing.algorithm.options import AlgorithmOptions
from topkv_testing.algorithm.queries import QueriesTests
from topkv_testing.algorithm.selection import SelectionTests
from topkv_testing.algorithm.state import StateTests
from topkv_testing.stage.estimate import EstimateTests
from topkv_testing.stage.keep import KeepTests
from topkv_testing.stage.options import OptionTests
from topkv_testing.stage.oracles import Left, StageOptions, along_a_line, fewest
from topkv_testing.stage.refine import RefineTests

__all__ = [
    "AlgorithmOptions",
    "Left",
    "OptionTests",
    "StageOptions",
    "StageTests",
    "along_a_line",
    "fewest",
]


# pytest runs the tests of the last base first: there stand those that say most of a mistake.
class StageTests(
    KernelTests,
    QueriesTests,
    StateTests,
    BatchTests,
    SelectionTests,
    KeepTests,
    EstimateTests,
    CorrectTests,
    RefineTests,
):
    """Every test of a stage; the fixtures ``plugin`` and ``options`` are the author's."""

    kind = "stage"
