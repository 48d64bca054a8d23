"""Requests of PQCache in the bench of the kit, and what is kept of them."""

from __future__ import annotations

import math

import torch

from topkv_pqcache import reference
from topkv_testing.algorithm.case import Case
from topkv_testing.strategies import Geometry

PARAMS = {"subvectors": 2, "bits": 2, "window": 8, "segment": 20, "iterations": 3}


def case_of(heads=2, dim=8, dtype=torch.float32, keys="normal", seed=0, units=64, **params):
    return Case(
        Geometry(heads, 2, dim, 1, 4, "kv_head", dtype),
        {**PARAMS, **params},
        *(5, 2, keys, seed),
        least_units=units,
        stale=math.nan,
        exact=False,
    )


def held(bench, slot):
    """The parts of a request's pools that count: codes, codebooks, and open keys."""
    starts, codes, centroids = codebooks(bench, slot)
    coded, places = int(bench.pools["state"][slot, 1]), bench.algorithm.places
    keys = bench.pools["keys"][slot].cpu()
    positions = torch.arange(coded, len(bench.keys[slot]))
    return {
        "starts": torch.tensor(starts),
        "codes": codes[:, :coded].contiguous(),
        "centroids": centroids[:, : len(starts)].contiguous(),
        "open": keys[:, positions % places].transpose(0, 1).contiguous(),
    }


def cut_to(bench, length):
    """Truncate request 0 as the core does."""
    bench.keys[0], bench._high[0] = bench.keys[0][:length], length
    bench._settled[0] = min(bench._settled[0], length)
    bench.algorithm.truncated(bench.layer, 0, length)


def starts_of(bench, slot=0):
    return codebooks(bench, slot)[0]


def codebooks(bench, slot):
    """starts, codes ``[h, U, m]`` and centroids ``[h, P, m, C, d]`` of a request, on the CPU."""
    pools = {name: pool[slot].cpu() for name, pool in bench.pools.items()}
    return pools["starts"][: pools["state"][0]].tolist(), pools["codes"], pools["centroids"]


def reconstructed(bench, slot):
    """Keys that the codes of a request stand for, fp32 ``[n, h, D]`` of the first n tokens."""
    starts, codes, centroids = codebooks(bench, slot)
    length = int(bench.pools["state"][slot, 1])
    book = torch.tensor([sum(start <= t for start in starts) - 1 for t in range(length)])
    return reference.reconstruct(codes[:, :length], book, centroids).transpose(0, 1)
