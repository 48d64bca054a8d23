"""Folders of sessions: whatever cuts a write short leaves one session and nothing else of topkv's,
and files that are not topkv's stay."""

from __future__ import annotations

import json
import os
import zlib

import pytest
import torch

from topkv.errors import CapabilityError, ConfigError, StorageError
from topkv_transformers.folders import HEAD, MANIFEST, SessionFolder


def rows_of(value, count=2):
    for row in range(2):
        yield {"length": row}, ({"a": torch.full((3,), value + at)} for at in range(count))


def said_in(folder):
    """The session of a folder: a number, and the first number of each part."""
    found = SessionFolder(folder).read()
    parts = [block["a"][0].item() for row in range(2) for block in found.blocks(row)]
    return found.document["said"], parts


def write(folder, value, count=2):
    SessionFolder(folder).write({"said": value}, rows_of(value, count))


def expected(value, count=2):
    return value, [value + at for at in range(count)] * 2


class Cut(BaseException):
    """Ends a write."""


def cut_at(monkeypatch, number, error):
    """Raise at a call to the system of those that a write makes, counted from 0. Those that it
    makes behind it, to tidy up, work."""
    calls = 0

    def counted(real):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls - 1 == number:
                raise error
            return real(*arguments, **options)

        return call

    for name in ("fsync", "replace", "open"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Cut()], ids=type)
@pytest.mark.parametrize("old", [False, True])
def test_a_write_that_fails_leaves_one_session_alone(tmp_path, monkeypatch, old, error):
    for number in range(12):
        folder = tmp_path / str(number)
        if old:
            write(folder, 10, 3)
        with monkeypatch.context() as patch:
            cut_at(patch, number, error)
            try:
                write(folder, 20)
            except (OSError, Cut):
                pass
            else:
                assert number == 10, "a write makes ten calls"
                break
        files = {each.name for each in folder.iterdir()} if folder.exists() else set()
        if MANIFEST not in files:
            assert not old
            assert not files
            continue
        said, parts = said_in(folder)
        assert (said, parts) in ([expected(10, 3)] if old else []) + [expected(20)]
        assert len(files) == 1 + len(parts)
    else:
        pytest.fail("a write never ended")


@pytest.mark.parametrize("old", [False, True])
def test_what_a_dead_writer_has_left_goes_with_the_next_write(tmp_path, monkeypatch, old):
    for number in range(10):
        folder = tmp_path / str(number)
        if old:
            write(folder, 10, 3)
        child = os.fork()
        if child == 0:
            try:
                with monkeypatch.context() as patch:
                    cut_at(patch, number, Cut())
                    patch.setattr(SessionFolder, "_settle", lambda folder, note: os._exit(9))
                    write(folder, 20)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (1, 9)
        if old:
            assert said_in(folder) in (expected(10, 3), expected(20))
        write(folder, 30, 1)
        assert said_in(folder) == expected(30, 1)
        assert len([*folder.iterdir()]) == 3


def test_who_writes_now_is_left_alone(tmp_path):
    def slow():
        yield {"length": 0}, [{"a": torch.tensor([7])}]
        write(tmp_path, 20)  # begins later, and ends before
        assert said_in(tmp_path) == expected(20)
        yield {"length": 1}, [{"a": torch.tensor([8])}]

    SessionFolder(tmp_path).write({"said": 7}, slow())
    assert said_in(tmp_path) == (7, [7, 8])
    assert len([*tmp_path.iterdir()]) == 3


def test_a_note_that_is_gone_is_no_error(tmp_path):
    """Another writer has taken it for that of a dead one, before it was locked."""

    def robbed():
        (note,) = tmp_path.glob("*.unfinished")
        note.unlink()
        yield from rows_of(10)

    SessionFolder(tmp_path).write({"said": 10}, robbed())
    assert said_in(tmp_path) == expected(10)


def test_files_of_others_stay(tmp_path):
    others = {
        "session.new": b"my notes",
        f"{'ab' * 16}.unfinished": b"my notes",
        f"{'ab' * 16}-0-0.safetensors": b"my weights",
        "model.safetensors": b"my weights",
    }
    for name, text in others.items():
        (tmp_path / name).write_bytes(text)
    for value in (10, 20):
        write(tmp_path, value)
        assert said_in(tmp_path) == expected(value)
        assert all((tmp_path / name).read_bytes() == text for name, text in others.items())
    assert len([*tmp_path.iterdir()]) == 5 + len(others)


def test_a_manifest_that_names_others_removes_none(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    rows = [{"request": {}, "parts": [{"file": "thesis.tex", "bytes": 5, "crc32": 0}]}]
    body = json.dumps({"rows": rows}).encode()
    (tmp_path / MANIFEST).write_bytes(f"{HEAD} {zlib.crc32(body)}\n".encode() + body)
    write(tmp_path, 10)
    assert (tmp_path / "thesis.tex").read_text() == "years"
    assert said_in(tmp_path) == expected(10)


@pytest.mark.parametrize("kind", ["file", "empty", "directory", "pipe", "device"])
def test_a_manifest_that_is_not_topkvs_stays(tmp_path, kind):
    """Nobody waits for such a file, neither to write nor to read."""
    path = tmp_path / MANIFEST
    {
        "file": lambda: path.write_text("my notes"),
        "empty": path.touch,
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    before = os.lstat(path)
    with pytest.raises(StorageError, match="session' is not of topkv, and stays; take another"):
        write(tmp_path, 10)
    with pytest.raises(CapabilityError, match="cannot be resumed"):
        SessionFolder(tmp_path).read()
    after = os.lstat(path)
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert [*tmp_path.iterdir()] == [path]


def test_a_part_that_is_a_pipe_is_refused(tmp_path):
    write(tmp_path, 10)
    part = next(tmp_path.glob("*-0-0.safetensors"))
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(CapabilityError, match=r"cannot be read: .*no regular file"):
        said_in(tmp_path)


@pytest.mark.parametrize("path", [None, 3, "", b"", "a\0b", "a\ud800", [], ...], ids=ascii)
def test_a_folder_that_cannot_be(path):
    with pytest.raises(ConfigError, match="must be the path of a folder, or a session of"):
        SessionFolder(path)
