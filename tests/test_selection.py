"""Cases that a commit leaves to a night."""

from __future__ import annotations

import pytest
from attrs import field, frozen

from tests.selection import left_out


@frozen(eq=False)
class Case:
    """Name and marks of a collected test.

    Attributes:
        nodeid: as pytest names it.
        marks: by name.
    """

    nodeid: str
    marks: dict[str, pytest.Mark] = field(factory=dict)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def cases(test, count, **more):
    marks = {"sampled": pytest.mark.sampled(3).mark, **more}
    return [Case(f"tests/test_a.py::{test}[{n}]", marks) for n in range(count)]


def test_of_a_sampled_test_one_case_of_three_runs_and_always_the_same_ones():
    many, few, plain = cases("test_many", 10), cases("test_few", 2), [Case("tests/test_a.py::b")]
    late = {each.nodeid for each in left_out([*many, *few, *plain])}
    assert [sum(each.nodeid in late for each in found) for found in (many, few, plain)] == [
        6,
        1,
        0,
    ]
    assert {each.nodeid for each in left_out([*plain, *few[::-1], *many[::-1]])} == late
    for case in many:
        assert not [*left_out([case])], "it was asked for alone"


@pytest.mark.parametrize("mark", ["nightly", "gpu", "skip"])
def test_what_does_not_run_anyway_is_no_sample(mark):
    kept, other = cases("test_many", 3), cases("test_many", 60, **{mark: pytest.mark.gpu.mark})
    assert len([*left_out([*other, *kept])]) == 2
