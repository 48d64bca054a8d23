"""Killed writers, full disks, two processes, and the commands' reports about them."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from click.testing import CliRunner

from topkv.errors import ConfigError
from topkv_files import folder as folders
from topkv_files.commands import storage as command
from topkv_files.entry import topkv_register_storages
from topkv_files.storage import FilesStorage
from topkv_prefixes.objects import HEADER, MAGIC, owner_of, problem_of, write_header
from topkv_prefixes.storage import OWNER_BYTES, StorageSetup
from topkv_testing.kit import params_of

SIZE = 3000
"""Bytes of the pages of these tests."""


def made(path, **params):
    setup = params_of(topkv_register_storages()[0], {"path": path, "sync": False, **params})
    return FilesStorage(StorageSetup(setup, SIZE + HEADER, np.zeros(0, dtype=np.uint8)))


def key_of(number):
    return number.to_bytes(4, "big") * 8


def page(number, size=SIZE):
    """A page that follows from its number: a header, and two parts."""
    body = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    header = np.zeros(HEADER, dtype=np.uint8)
    write_header(header, key_of(number), bytes(32), [body])
    return [header, body[:1000], body[1000:]]


def read(storage, number, size=SIZE):
    """The problem of a stored page, or "absent"."""
    place = [np.zeros(HEADER, dtype=np.uint8), np.zeros(size, dtype=np.uint8)]
    (there,) = storage.get([key_of(number)], [place])
    if not there:
        return "absent"
    problem = problem_of(place[0], place[1:], key_of(number), bytes(32))
    if problem is None:
        expected = np.concatenate(page(number, size)[1:])
        assert (place[1] == expected).all()
    return problem


WRITER = """
import sys
import numpy as np
sys.path[:0] = {paths!r}
from test_faults import key_of, made, page
storage = made({folder!r}, sync=True)
pages = [page(number) for number in range(64)]
print("begun", flush=True)
while True:
    for number, place in enumerate(pages):
        storage.put([key_of(number)], [place])
        if number % 8 == 7:
            storage.delete([key_of(number - 5)])
    storage.delete([key_of(number) for number in range(64)])
"""


@pytest.mark.nightly
def test_writers_that_are_killed_leave_whole_pages(tmp_path):
    """Two hundred writers are killed at any moment; forks of one process, which are quick."""
    folder, draw, seen = str(tmp_path / "pages"), random.Random(1), 0
    pages = [page(number) for number in range(16)]
    storage = made(folder)
    left = 0
    for turn in range(200):
        began, begun = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                mine = made(folder, sync=turn % 2 == 0)
                os.write(begun, b"x")
                while True:
                    for number, place in enumerate(pages):
                        mine.put([key_of(number)], [place])
                    mine.delete([key_of(number) for number in range(16)])
            finally:
                os._exit(1)
        os.close(begun)
        assert os.read(began, 1) == b"x"
        os.close(began)
        time.sleep(draw.random() * 0.003)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for number in range(16):
            problem = read(storage, number)
            assert problem in (None, "absent"), problem
            seen += problem is None
        left += len(os.listdir(tmp_path / "pages" / "new"))
        made(folder)  # opens again, and tidies up
        assert not os.listdir(tmp_path / "pages" / "new")
    assert seen > 200
    assert left > 20, "no writer was killed in a write"


def test_two_processes_share_a_directory(tmp_path):
    """One writes and removes, two read; what is there is whole."""
    folder = str(tmp_path)
    source = WRITER.format(paths=[os.path.dirname(__file__)], folder=folder)
    writers = [
        subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "begun\n"
        storage, whole, turns = made(folder), 0, 0
        while (whole < 300 or turns < 10) and turns < 2000:
            turns += 1
            for number in range(64):
                problem = read(storage, number)
                assert problem in (None, "absent"), problem
                whole += problem is None
            storage.put([key_of(turns % 64)], [page(turns % 64)])
        assert whole >= 300
        assert all(writer.poll() is None for writer in writers)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()


def test_a_writer_that_is_at_work_is_no_leftover(tmp_path, monkeypatch):
    storage, swept = made(tmp_path), []
    rename = os.rename

    def sweeping(old, new):
        swept.append(folders.Folder(tmp_path).clean())
        rename(old, new)

    monkeypatch.setattr(folders.os, "rename", sweeping)
    assert storage.put([key_of(1)], [page(1)]) == [True]
    assert set(swept) == {0}
    (tmp_path / "new" / ("ab" * 16)).write_bytes(MAGIC + b"half a page")
    assert folders.Folder(tmp_path).clean() == 1


def in_files_of(patch, **methods):
    """Let the files that a folder opens write or read in another way."""
    kind = type("Faulty", (io.FileIO,), methods)
    buffer = {"rb": io.BufferedReader, "wb": io.BufferedWriter}
    patch.setattr(
        folders, "open", lambda file, mode: buffer[mode](kind(file, mode)), raising=False
    )


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_refuses_and_another_fault_is_reported(
    tmp_path, monkeypatch, call, number
):
    storage = made(tmp_path, sync=True)
    storage.put([key_of(0)], [page(0)])

    def fails(*arguments, **options):
        raise OSError(number, os.strerror(number))

    places = [page(n) for n in (0, 1, 2)]
    with monkeypatch.context() as patch:
        if call == "write":
            in_files_of(patch, write=fails)
        else:
            patch.setattr(folders.os, call, fails)
        keys = [key_of(n) for n in (0, 1, 2)]
        if number == errno.EIO:
            with pytest.raises(OSError, match="Input/output"):
                storage.put(keys, places)
        else:
            assert storage.put(keys, places) == [True, False, False]
    assert not os.listdir(tmp_path / "new")
    assert [read(storage, n) for n in (0, 1, 2)] == [None, "absent", "absent"]
    assert storage.put([key_of(1)], [page(1)]) == [True]


@pytest.mark.parametrize("most", [1, 100, 4096, 5000])
def test_calls_that_bring_less_than_they_should(tmp_path, monkeypatch, most):
    storage, write, readinto = made(tmp_path), io.FileIO.write, io.FileIO.readinto
    with monkeypatch.context() as patch:
        in_files_of(
            patch,
            write=lambda file, part: write(file, part[:most]),
            readinto=lambda file, part: readinto(file, memoryview(part)[:most]),
        )
        assert storage.put([key_of(1)], [page(1)]) == [True]
        assert read(storage, 1) is None
    assert storage.put([key_of(2)], [page(2)]) == [True]
    assert [read(storage, 1), read(storage, 2)] == [None, None]


def test_what_went_unused_longest_makes_room(tmp_path):
    size = SIZE + HEADER
    storage, other = (made(tmp_path, limit=10 * size) for _ in range(2))
    for number in range(10):
        assert storage.put([key_of(number)], [page(number)]) == [True]
        os.utime(storage._folder.path_of(key_of(number)), ns=(number, number))
    assert storage.usage().objects == 10
    assert other.exists([key_of(0)]) == 1  # used now
    storage.put([key_of(10)], [page(10)])
    left = [number for number in range(11) if read(other, number) is None]
    assert left == [0, *range(3, 11)]
    for number in range(20, 40):  # the other one counts what this one writes
        other.put([key_of(number)], [page(number)])
        storage.put([key_of(number + 100)], [page(number + 100)])
        assert storage.usage().bytes <= 12 * size


def test_the_first_pages_of_a_prompt_go_last(tmp_path):
    size = SIZE + HEADER
    storage = made(tmp_path, limit=10 * size)
    keys = [key_of(number) for number in range(6)]

    def used():
        return [os.stat(storage._folder.path_of(key)).st_mtime_ns for key in keys]

    storage.put(keys, [page(number) for number in range(6)])
    written = used()
    assert written == sorted({*written}, reverse=True), "no two are alike"
    assert storage.exists(keys) == 6
    assert used() == sorted({*used()}, reverse=True)
    assert min(used()) > max(written)
    storage.put([key_of(9)], [page(9)])
    others = [key_of(number) for number in range(10, 14)]
    storage.put(others, [page(number) for number in range(10, 14)])
    left = [number for number in (*range(6), 9, *range(10, 14)) if read(storage, number) is None]
    assert left == [0, 1, 2, 3, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"path": None}, "path must be that of a directory, got '': set it in params"),
        ({"path": ""}, "path of files must be that of a directory, got ''"),
        ({"limit": "much"}, "limit of files must be a positive number of bytes"),
        ({"sync": 1}, "sync of files must be true or false, got 1"),
    ],
)
def test_parameters_that_are_wrong_are_refused(tmp_path, params, reason):
    with pytest.raises(ConfigError, match=reason):
        made(**{"path": tmp_path, **params})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used: .*(Not a directory|File exists)"):
        made(tmp_path / "file")


def run(*arguments):
    return CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)


def key_for(tenant, number):
    return owner_of(tenant) + number.to_bytes(32 - OWNER_BYTES, "big")


def limited(path, quotas, **params):
    setup = params_of(topkv_register_storages()[0], {"path": path, "sync": False, **params})
    owners = {owner_of(tenant): size for tenant, size in quotas.items()}
    memory = np.zeros(0, dtype=np.uint8)
    return FilesStorage(StorageSetup(setup, SIZE + HEADER, memory, owners.get))


def place_of(size):
    return [np.frombuffer(bytearray(MAGIC.ljust(size)), dtype=np.uint8)]


def test_an_owner_loses_what_went_unused_longest(tmp_path):
    """The answer to a put says which pages of a batch the quota has no room for."""
    storage = limited(tmp_path, {"a": 4000})
    keys = [key_for("a", n) for n in range(4)]
    assert storage.put(keys, [place_of(900)] * 4) == [True] * 4
    assert storage.exists(keys[:1]) == 1
    assert storage.put([key_for("b", 0)], [place_of(9000)]) == [True]
    assert storage.put([key_for("a", 4)], [place_of(900)]) == [True]
    assert [storage.exists([key]) for key in keys] == [1, 1, 1, 0]  # the first of a batch is newer
    more = [key_for("a", n) for n in range(10, 16)]
    done = storage.put(more, [place_of(900)] * 6)
    assert done == [bool(storage.exists([key])) for key in more]
    assert done == [True] * 4 + [False] * 2
    assert storage.exists([key_for("b", 0)])


def test_one_object_more_than_half_a_quota_stays(tmp_path):
    storage = limited(tmp_path, {"a": 1050})
    for number in range(4):
        assert storage.put([key_for("a", number)], [place_of(1000)]) == [True]
        assert found_in(tmp_path) == [key_for("a", number)]


def test_a_prompt_that_is_asked_for_is_used_in_order(tmp_path):
    """The prompt's last pages go first, in however many calls they were stored and are read."""
    storage = limited(tmp_path, {"a": 8000})
    keys = [key_for("a", number) for number in range(6)]
    for at in (4, 2, 0):
        storage.put(keys[at : at + 2], [place_of(1000)] * 2)
    assert storage.exists([*keys, key_for("a", 99)]) == 6
    for at in (0, 2, 4):
        assert storage.get(keys[at : at + 2], [place_of(1000)] * 2) == [True, True]
    for number in range(10, 13):
        storage.put([key_for("a", number)], [place_of(1000)])
    assert storage.exists(keys) == len({*found_in(tmp_path)} & {*keys}) == 4


def test_an_owner_is_not_left_to_whoever_shrinks_another(tmp_path):
    """The put waits for the lock of the directory, and is then within its quota."""
    storage, keys = limited(tmp_path, {"a": 4000}), [key_for("a", n) for n in range(8)]
    with ThreadPoolExecutor(1) as pool:
        with folders.Folder(tmp_path)._alone(wait=True):
            answer = pool.submit(storage.put, keys, [place_of(1000)] * 8)
            while len(found_in(tmp_path)) < 8:
                time.sleep(0.001)
            assert not answer.done()
        assert sum(answer.result(60)) == len(found_in(tmp_path)) <= 4


def test_quotas_and_the_limit_hold_together(tmp_path):
    storage = limited(tmp_path, {"a": 4000}, limit=20_000)
    for number in range(40):
        for tenant in ("a", "b"):
            storage.put([key_for(tenant, number)], [place_of(1000)])
        held = [sum(key.startswith(owner_of(tenant)) for key in found_in(tmp_path))
                for tenant in ("a", "b")]  # fmt: skip
        assert held[0] <= 4
        assert sum(held) <= 20
    assert held[1] > 10


def found_in(path):
    return [held.key for held in folders.Folder(path).held()]


def test_commands_know_tenants(tmp_path):
    storage = limited(tmp_path, {})
    for tenant, count in (("a", 3), ("b", 2)):
        for number in range(count):
            key = key_for(tenant, number)
            header, body = np.zeros(HEADER, dtype=np.uint8), np.zeros(10, dtype=np.uint8)
            write_header(header, key, bytes(32), [body])
            storage.put([key], [[header, body]])
    (listed,) = json.loads(run("ls", tmp_path, "--tenant", "a", "--json").stdout)
    assert listed["pages"] == 3
    run("prune", tmp_path, "--tenant", "a", "--limit", HEADER + 10)
    assert len(found_in(tmp_path)) == 3
    run("prune", tmp_path, "--tenant", "b", "--days", 0)
    assert [key[:OWNER_BYTES] for key in found_in(tmp_path)] == [owner_of("a")]


def test_commands_list_check_and_prune(tmp_path):
    storage = made(tmp_path)
    for number in range(5):
        storage.put([key_of(number)], [page(number)])
        os.utime(storage._folder.path_of(key_of(number)), ns=(number, number * 10**9))
    (listed,) = json.loads(run("ls", tmp_path, "--json").stdout)
    assert (listed["pages"], listed["bytes"]) == (5, 5 * (SIZE + HEADER))
    assert listed["fingerprint"] == "00" * 32
    assert "000000000000" in run("ls", tmp_path).stdout
    fine = run("verify", tmp_path)
    assert (fine.exit_code, fine.stdout) == (0, "5 pages are as they were written, 0 are not\n")
    first, second, third = (storage._folder.path_of(key_of(number)) for number in (0, 1, 2))
    with open(first, "r+b") as file:
        file.seek(HEADER + 77)
        file.write(bytes([page(0)[1][77] ^ 4]))
    os.truncate(second, HEADER + 5)
    os.truncate(third, 5)
    found = run("verify", tmp_path, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["damaged"] == {
        first: "its checksum is another one",
        second: f"it has 5 bytes, expected {SIZE}",
        third: "its header is damaged",
    }
    assert "removed" in run("verify", tmp_path, "--delete").stdout
    assert run("verify", tmp_path).exit_code == 0
    (tmp_path / "new" / ("ab" * 16)).write_bytes(MAGIC + b"half a page")
    pruned = json.loads(run("prune", tmp_path, "--limit", SIZE + HEADER, "--json").stdout)
    assert pruned["left_by_dead_writers"] == 1
    assert pruned["bytes"] == SIZE + HEADER
    assert read(storage, 4) is None
    assert "0 bytes now" in run("prune", tmp_path, "--days", 1).stdout
    assert run("prune", tmp_path, "--limit", "lots").exit_code == 2
    assert run("ls", tmp_path / "nowhere").exit_code == 2
