"""Stands in for SGLang's kernels of drafts."""

from standing_in import stand_in

stand_in(__name__)


def reconstruct_indices_from_tree_mask(
    mask, lengths, positions, places, children, siblings, requests, drafts
):
    """Read trees off masks of ancestors: position of each node, its first child, and the next
    child of its parent; -1 where there is none."""
    trees = mask.view(requests, drafts, drafts).tolist()
    for request, tree in enumerate(trees):
        above = [[j for j in range(i) if tree[i][j]] for i in range(drafts)]
        parents = [max(each, default=-1) for each in above]
        for node in range(drafts):
            later = range(node + 1, drafts)
            positions[request * drafts + node] = int(lengths[request]) + len(above[node])
            places[request, node] = request * drafts + node
            children[request, node] = min((k for k in later if node in above[k]), default=-1)
            alike = (k for k in later if parents[k] == parents[node] >= 0)
            siblings[request, node] = min(alike, default=-1)
