"""Top-k by the real library on a real GPU, against the reference of the core."""

from __future__ import annotations

import pytest
import torch

from topkv.ops import topk_reference
from topkv.ops.topk import topk
from topkv_flashinfer import providers
from topkv_flashinfer.topk import FlashInferTopK

FOUND, TRIED = providers.find("topk")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(FOUND is None, reason="; ".join(TRIED)),
]


def reference(scores, lengths, select):
    ids = torch.full((len(scores), select), -7, dtype=torch.int32)
    topk_reference.topk(scores.cpu(), lengths.cpu().clamp(0, scores.shape[1]), ids)
    return ids


def ids_of(rows, select):
    return torch.full((rows, select + 3), -7, dtype=torch.int32, device="cuda")


def check(scores, lengths, select):
    ids = ids_of(len(scores), select)
    made = FlashInferTopK(len(scores) + 1, scores.shape[1], select, scores.device)
    topk(scores, lengths, ids[:, :select], impl="triton", work=made)
    assert torch.equal(ids[:, :select].cpu(), reference(scores, lengths, select))
    assert (ids[:, select:] == -7).all(), "wrote behind its row"


@pytest.mark.parametrize("columns", [1, 100, 2048, 4097, 20000, 131072])
@pytest.mark.parametrize("select", [1, 64, 2048])
@pytest.mark.parametrize("kind", ["normal", "few values", "equal"])
def test_ragged_rows(columns, select, kind):
    generator = torch.Generator(device="cuda").manual_seed(columns + select)
    scores = torch.randn(6, columns + 5, device="cuda", generator=generator)
    if kind == "few values":
        scores = scores.mul(2).round()
    if kind == "equal":
        scores.fill_(0.25)
    sizes = [columns, 0, 1, columns // 2, -4, columns + 9]
    lengths = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    scores[3, columns // 2 :] = torch.nan
    check(scores[:, :columns], lengths, select)


def test_special_scores():
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.nan, torch.inf, -torch.inf, 1e-40, -1e-40])
    scores = values[torch.randint(0, 9, (40, 3000))].cuda()
    lengths = torch.randint(0, 3001, (40,), dtype=torch.int32).cuda()
    for select in (3, 512, 2000):
        check(scores, lengths, select)


def test_many_rows():
    """Above 128 rows the library chooses another path."""
    scores = torch.randn(300, 9000, device="cuda").mul(50).round()
    lengths = torch.randint(0, 9001, (300,), dtype=torch.int32, device="cuda")
    check(scores, lengths, 256)


def test_replays_follow_scores_and_lengths():
    scores = torch.randn(5, 30000, device="cuda")
    lengths = torch.full((5,), 30000, dtype=torch.int32, device="cuda")
    work, ids = FlashInferTopK(5, 30000, 512, scores.device), ids_of(5, 512)

    def run():
        topk(scores, lengths, ids[:, :512], impl="triton", work=work)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for sizes in ([30000, 5, 0, 600, 29999], [0, 30000, 30000, 1, 512]):
        scores.normal_()
        lengths.copy_(torch.tensor(sizes))
        ids.fill_(-7)
        graph.replay()
        assert torch.equal(ids[:, :512].cpu(), reference(scores, lengths, 512))
