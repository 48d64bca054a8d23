"""Stands in for SGLang's kernels; those that a CPU calls are here, by their formulas."""

from standing_in import stand_in

stand_in(__name__)


def assign_req_to_token_pool_cpu(rows, places, first, end, given, columns):
    """Write places of tokens into rows."""
    at = 0
    for row, start, stop in zip(rows.tolist(), first.tolist(), end.tolist(), strict=True):
        places[row, start:stop] = given[at : at + stop - start].to(places.dtype)
        at += stop - start


def verify_tree_greedy_cpu(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow each request's tree from its root, as long as a child is what the model predicts."""
    for request, tokens in enumerate(candidates.tolist()):
        node, kept = 0, 0
        while True:
            at = int(retrive_index[request, node])
            accept_index[request, kept] = at
            predicts[at] = target_predict[request, node]
            child = int(retrive_next_token[request, node])
            while child >= 0 and tokens[child] != int(target_predict[request, node]):
                child = int(retrive_next_sibling[request, child])
            if child < 0:
                break
            node, kept = child, kept + 1
        accept_token_num[request] = kept
