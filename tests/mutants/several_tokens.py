"""Transfer engines with one bug each in rows that append several tokens in a step."""

from __future__ import annotations

from tests.mutants.transfers import kernels_with, mutant, reference_with
from topkv.transfer import kernels, token_kernels


class OffloadsTheLastOfSeveral(
    reference_with(
        "range((length - int(step.appended[batch])) // unit,",
        "range(max((length - int(step.appended[batch])) // unit, length // unit - 1),",
    )
):
    """Only the last of the units that a row fills in one step goes to the host."""


class AppendsAtTheEnd(
    reference_with(
        "divmod(length - new + nth, self.group.unit)", "divmod(length - 1, self.group.unit)"
    )
):
    """All new tokens of a row go to the place of the last."""


class KernelOffloadsTheFirstOfSeveral(
    kernels_with(
        kernels,
        "closes = unit < length // UNIT",
        "closes = (unit < length // UNIT) & (tl.program_id(2) == 0)",
    )
):
    """The offload kernel moves the first alone of the units that a row fills in one step."""


class KernelAppendsTheFirst(
    kernels_with(
        token_kernels,
        "(slot >= 0) & (nth < appended)",
        "(slot >= 0) & (nth < appended) & (nth == 0)",
    )
):
    """The append kernel writes the first new token of a row and leaves the others."""


_SEVERAL = "test_several_tokens_are_where_one_by_one_puts_them"

MUTANTS = [
    mutant(OffloadsTheLastOfSeveral, _SEVERAL),
    mutant(AppendsAtTheEnd, "test_several_tokens_of_dense_layers"),
    mutant(KernelOffloadsTheFirstOfSeveral, _SEVERAL, "interpret"),
    mutant(KernelAppendsTheFirst, _SEVERAL, "interpret"),
]
