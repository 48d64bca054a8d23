"""Stands in for SGLang's kernels; the one that a CPU without AMX calls is here."""

from standing_in import stand_in

stand_in(__name__)


def assign_req_to_token_pool_cpu(rows, places, first, end, given, columns):
    """Write places of tokens into rows."""
    at = 0
    for row, start, stop in zip(rows.tolist(), first.tolist(), end.tolist(), strict=True):
        places[row, start:stop] = given[at : at + stop - start].to(places.dtype)
        at += stop - start
