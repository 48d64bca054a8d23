"""Trace files: what is written is read, and what is damaged or changed is refused."""

from __future__ import annotations

import json
import os
import struct
import zipfile

import numpy as np
import pytest
import torch
from attrs import evolve

from topkv_simulate.recorder import recording
from topkv_simulate.replay import Replayer
from topkv_simulate.trace import Trace, TraceError
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    make_coordinator,
)
from topkv_testing.tiers import tier


@pytest.fixture(scope="module")
def trace():
    """Two groups, a prompt and three steps."""
    coordinator = make_coordinator(
        tier("cpu"),
        layers={"1": "resident", "2": "streamed", "3": {"unit": 1, "scope": "shared"}},
    )
    with recording(coordinator) as recorder:
        slot = coordinator.request_begin()
        for rows, what in ((33, {"prefill": [(slot, 33)]}), *[(1, {"decode": [slot]})] * 3):
            coordinator.forward_begin(**what)
            for layer in range(LAYERS):
                path = coordinator.layers[layer]
                if path.algorithm:
                    ids = torch.arange(path.view.group.select, dtype=torch.int32)[None]
                    path.algorithm.next_ids[layer] = ids
                sizes = (HEADS, KV_HEADS, KV_HEADS)
                coordinator.attention(layer, *(torch.ones(rows, heads, DIM) for heads in sizes))
            coordinator.forward_end()
    coordinator.close()
    return recorder.trace()


def saved(trace, tmp_path):
    path = tmp_path / "a trace.with.dots"
    trace.save(path)
    return path


def test_what_is_written_is_read(trace, tmp_path):
    path = saved(trace, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    found = Trace.load(path)
    assert found.settings == trace.settings
    assert found.settings["eviction"] == "lru"
    for name in ("rows", "events"):
        assert np.array_equal(getattr(found, name), getattr(trace, name))
    assert len(found.groups) == 2
    for one, other in zip(found.groups, trace.groups, strict=True):
        assert one.geometry == other.geometry
        for name in ("ids", "limits", "counts"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == np.int32
    Replayer(found).check()


def test_entries_are_those_of_the_group(trace):
    """Two planes of fp32 rows; a lane of the second group holds both kv-heads."""
    one, other = (group.geometry for group in trace.groups)
    assert (one.layers, one.unit, one.lane_heads) == ((0,), 2, 2)
    assert one.entry_bytes == 2 * 2 * DIM * 4
    assert (other.layers, other.unit, other.lane_heads) == ((3,), 1, 1)
    assert other.entry_bytes == 2 * 2 * 1 * DIM * 4


@pytest.mark.parametrize("cut", [0, 1, 100, 1000])
def test_a_file_that_ends_early_is_refused(trace, tmp_path, cut):
    path = saved(trace, tmp_path)
    content = path.read_bytes()
    assert len(content) > 1000
    path.write_bytes(content[:cut] if cut != 1 else content[:-1])
    with pytest.raises(TraceError, match="cannot be replayed"):
        Trace.load(path)


def test_a_byte_that_changed_is_never_taken_for_another_count(trace, tmp_path):
    """Archives have a checksum for each array, and for their directory what can be checked."""
    path = saved(trace, tmp_path)
    content = path.read_bytes()
    refused = 0
    for place in range(0, len(content), 37):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            found = Trace.load(path)
        except TraceError:
            refused += 1
        else:  # a date, say
            assert np.array_equal(found.rows, trace.rows)
            assert np.array_equal(found.groups[1].ids, trace.groups[1].ids)
    assert refused > len(content) / 37 / 2


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04", b"\x93NUMPY\x01\x00"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="expected an npz"):
        Trace.load(path)


def test_other_archives_are_refused(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, values=np.zeros(3))
    with pytest.raises(TraceError, match="KeyError: 'header'"):
        Trace.load(path)
    np.savez(path, header=np.array([{"a": 1}], object))
    with pytest.raises(TraceError, match="allow_pickle"):
        Trace.load(path)
    np.savez(path, header=np.array("[1]"))
    with pytest.raises(TraceError, match="expected an npz with a header"):
        Trace.load(path)


def member(shape, version=(1, 0)):
    """Return an array of a file, without its values."""
    dictionary = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = dictionary.ljust(117) + b"\n"
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("shape", [(100_000_000_000, 7), (2**62, 2**62), (1,)])
def test_an_array_that_is_not_in_its_file_is_refused(tmp_path, shape, version):
    path = tmp_path / "large.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rows.npy", member(shape, version))
    with pytest.raises(TraceError, match="expected an npz with a header"):
        Trace.load(path)


def test_arrays_that_do_not_fit_this_machine_are_refused(trace, tmp_path, monkeypatch):
    path = saved(trace, tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 30)
    with pytest.raises(TraceError, match=r"its arrays have \d+ bytes, and this machine has 900"):
        Trace.load(path)


def test_there_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "absent")


def refused(trace, tmp_path, header=None, **arrays):
    """Return the reason against a trace that was changed; None leaves an array out."""
    path = saved(trace, tmp_path)
    with np.load(path) as file:
        found = {name: file[name] for name in file.files}
    found |= arrays
    found["header"] = np.array(json.dumps(json.loads(str(found["header"])) | (header or {})))
    with path.open("wb") as file:
        np.savez(file, **{name: each for name, each in found.items() if each is not None})
    with pytest.raises(TraceError) as error:
        Trace.load(path)
    (reason,) = error.value.reasons
    return reason


def test_another_version_is_refused_by_name(trace, tmp_path):
    reason = refused(trace, tmp_path, {"version": 1, "settings": None})
    assert reason.startswith("expected 'topkv trace' of version 2, got 'topkv trace' of 1")
    assert "got 'another' of 2" in refused(trace, tmp_path, {"format": "another"})


CHANGED = "it is not as it was written"


def test_whatever_was_changed_is_refused(trace, tmp_path):
    with np.load(saved(trace, tmp_path)) as file:
        found = {name: file[name] for name in file.files if name not in ("header", "digest")}
    for name, array in found.items():
        one = array.copy()
        one.flat[0] += 1
        for other in (one, array[1:], array.astype(np.int64), array.ravel(), None):
            same = other is not None and other.dtype == array.dtype and other.shape == array.shape
            if not (same and np.array_equal(other, array)):
                assert CHANGED in refused(trace, tmp_path, **{name: other}), name
    assert CHANGED in refused(trace, tmp_path, {"settings": {}})
    assert CHANGED in refused(trace, tmp_path, digest=np.array("0"))
    assert CHANGED in refused(trace, tmp_path, more=np.zeros(3))


def test_a_trace_that_counts_otherwise_does_not_replay(trace):
    first, second = trace.groups
    counts = second.counts.copy()
    counts[-1, 0, 0] += [1, -1]
    changed = evolve(trace, groups=(first, evolve(second, counts=counts)))
    with pytest.raises(TraceError, match=r"layer 3: .* misses were counted"):
        Replayer(changed).check()
