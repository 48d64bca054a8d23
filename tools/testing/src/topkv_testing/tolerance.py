"""The tolerance of a result: as far from the truth as plain torch of the same precision is.

After attention-gym: nobody picks a tolerance; it follows from what the dtype can do on the very
input at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_good(
    actual: Tensor, truth: Tensor, rough: Tensor, what: str = "result", slack: float = 0.0
) -> None:
    """Assert that ``actual`` is at most twice as far from ``truth`` as ``rough``, plus roundings.

    Infinities must be where the truth has them. NaN anywhere fails.

    Args:
        actual: what is tested.
        truth: float64, from an independent oracle.
        rough: the same from plain torch in the dtype that is tested.
        what: for the message.
        slack: further absolute error that the caller can account for.

    Raises:
        AssertionError: with the errors of both.
    """
    actual, truth = actual.double().cpu(), truth.double().cpu()
    eps = torch.finfo(rough.dtype).eps
    rough = rough.double().cpu()
    assert actual.shape == truth.shape, f"{what}: shape {actual.shape}, expected {truth.shape}"
    assert not actual.isnan().any(), f"{what} has NaN"
    infinite = truth.isinf()
    assert torch.equal(actual[infinite], truth[infinite]), f"{what} differs where it is infinite"
    assert not actual[~infinite].isinf().any(), f"{what} is infinite where it should not be"
    if infinite.all():
        return
    finite = ~infinite
    error = (actual - truth)[finite].abs().max()
    known = (rough - truth)[finite].abs().max()
    band = 4 * eps * truth[finite].abs().max()
    assert error <= 2 * known + band + slack, (
        f"{what} is {error:.3e} from the truth; plain torch is {known:.3e}, allowed are "
        f"{2 * known + band + slack:.3e}"
    )
