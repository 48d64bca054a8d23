"""Directories of others, and others' files in the storage's own directory, are left alone."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from topkv.errors import ConfigError
from topkv_files import owned
from topkv_files.commands import storage as command
from topkv_files.entry import topkv_register_storages
from topkv_files.storage import FilesStorage
from topkv_prefixes.objects import HEADER, MAGIC, write_header
from topkv_prefixes.storage import StorageSetup
from topkv_testing.kit import params_of

KEYS = [number.to_bytes(4, "big") * 8 for number in range(8)]
FOREIGN = "ef" * 32
"""A name that a key may have."""


def made(path, **params):
    setup = params_of(topkv_register_storages()[0], {"path": path, "sync": False, **params})
    return FilesStorage(StorageSetup(setup, HEADER + 50, np.zeros(0, dtype=np.uint8)))


def page(key):
    header, body = np.zeros(HEADER, dtype=np.uint8), np.full(50, key[3], dtype=np.uint8)
    write_header(header, key, bytes(32), [body])
    return [header, body]


def fill(storage, keys=KEYS):
    return storage.put(keys, [page(key) for key in keys])


def run(*arguments):
    return CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)


def tree(path):
    """Every entry below a directory, and the bytes of those that have any."""
    return {
        each.relative_to(path).as_posix(): each.read_bytes() if each.is_file() else None
        for each in sorted(path.rglob("*"))
    }


def git_objects(path):
    """Write objects as ``git init`` and a commit leave them."""
    for name in ("info", "pack", "4b"):
        (path / name).mkdir()
    (path / "4b" / "825dc642cb6eb9a060e54bf8d69288fbee4904").write_bytes(b"x\x9c+)JMU0`\0")


def thesis(path):
    (path / "new").mkdir()
    (path / "new" / "thesis.tex").write_text("years")


def sha256_files(path):
    """Write files named as pages are, by somebody who names files by their content."""
    (path / "ef").mkdir()
    (path / "ef" / FOREIGN).write_bytes(b"an image")


def link(path):
    (path / "ab").symlink_to("/etc")


def subdirectory(path):
    (path / "ef" / FOREIGN).mkdir(parents=True)


def pipe(path):
    (path / "new").mkdir()
    os.mkfifo(path / "new" / ("ab" * 16))


OTHERS = [git_objects, thesis, sha256_files, link, subdirectory, pipe]


@pytest.mark.parametrize("others", OTHERS, ids=lambda each: each.__name__)
def test_a_directory_of_others_is_refused_and_stays(tmp_path, others):
    others(tmp_path)
    before = tree(tmp_path)
    refused = rf"path '{tmp_path}' cannot be used: it holds what this storage has not made: /.*"
    with pytest.raises(ConfigError, match=refused + r"name an empty directory or a new one"):
        made(tmp_path, limit=1)
    for arguments in (["ls"], ["verify", "--delete"], ["prune", "--limit", 1, "--days", 0]):
        with pytest.raises(ConfigError, match="is no directory of the storage files"):
            run(arguments[0], tmp_path, *arguments[1:])
    assert tree(tmp_path) == before


@pytest.mark.parametrize("others", OTHERS, ids=lambda each: each.__name__)
def test_others_in_its_own_directory_stay(tmp_path, others):
    """Whoever put them there later: the storage works beside them, and so do the commands."""
    made(tmp_path).close()
    (tmp_path / "new").rmdir()
    others(tmp_path)
    (tmp_path / "new").mkdir(exist_ok=True)
    before = tree(tmp_path)
    storage = made(tmp_path, limit=3 * (HEADER + 50))
    assert storage.usage().objects == (others is sha256_files)  # nobody has read it
    for _ in range(2):
        assert sum(fill(storage)) <= 3
    storage.close()
    run("ls", tmp_path)
    run("verify", tmp_path, "--delete")
    run("prune", tmp_path, "--limit", 1)
    run("prune", tmp_path, "--days", 0)
    after = tree(tmp_path)
    assert before.items() <= after.items()
    assert not [name for name in after if name.endswith(tuple(key.hex() for key in KEYS))]


def test_files_of_another_user_stay(tmp_path, monkeypatch):
    """This user may not read such files, in whatever it looks at."""
    fill(made(tmp_path))
    (tmp_path / "new" / ("ab" * 16)).write_bytes(MAGIC)
    before = tree(tmp_path)

    def refuses(path, *arguments, real=os.open, **options):
        if len(os.path.basename(path)) >= 32:
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuses)
    storage = made(tmp_path, limit=2 * (HEADER + 50))
    storage._folder.shrink([storage._all])
    run("prune", tmp_path, "--days", 0)
    (listed,) = json.loads(run("ls", tmp_path, "--json").stdout)
    assert (listed["fingerprint"], listed["pages"]) == ("foreign", len(KEYS))
    assert "it is not of this user and topkv, and stays" in run("verify", tmp_path).stdout
    monkeypatch.undo()
    assert before.items() <= tree(tmp_path).items()


def test_old_directories_are_known_by_what_they_hold(tmp_path):
    """Old directories are of a version without markers, with what dead writers left in them."""
    fill(made(tmp_path))
    (tmp_path / owned.MARKER).unlink()
    (tmp_path / "lock").touch()
    (tmp_path / "new" / ("ab" * 16)).write_bytes(MAGIC + b"half")
    (tmp_path / "new" / ("cd" * 16)).touch()
    assert json.loads(run("verify", tmp_path, "--json").stdout)["good"] == len(KEYS)
    assert not (tmp_path / owned.MARKER).exists()
    storage = made(tmp_path)
    assert storage.exists(KEYS) == len(KEYS)
    assert (tmp_path / owned.MARKER).is_file()
    assert not os.listdir(tmp_path / "new")
    (tmp_path / owned.MARKER).unlink()
    (tmp_path / "README").touch()
    with pytest.raises(ConfigError, match=r"has not made: .*/README; name an empty"):
        made(tmp_path)
    (tmp_path / owned.MARKER).touch()  # as the error says
    assert made(tmp_path).exists(KEYS) == len(KEYS)


def entries(path):
    """Each kind of thing that may have a name: how it is made."""

    def bind(at):
        with socket.socket(socket.AF_UNIX) as listener:
            os.chdir(at.parent)  # such a path is short
            listener.bind(at.name)

    yield "pipe", os.mkfifo
    yield "socket", bind
    yield "directory", os.mkdir
    yield "link", lambda at: at.symlink_to(path / "nowhere")
    yield "device", lambda at: at.symlink_to("/dev/zero")


KINDS = ["pipe", "socket", "directory", "link", "device"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_waited_for_nowhere(tmp_path, kind, monkeypatch):
    """The thing has the name of a key, of an unfinished file, or of a shelf."""
    monkeypatch.chdir(tmp_path)
    make, key = dict(entries(tmp_path))[kind], KEYS[1]
    storage = made(tmp_path)
    at = Path(storage._folder.path_of(key))
    at.parent.mkdir(exist_ok=True)
    make(at)
    make(tmp_path / "new" / ("ab" * 16))
    make(tmp_path / "77")
    storage = made(tmp_path, limit=5 * (HEADER + 50))
    before = {each: os.lstat(each).st_ino for each in (at, tmp_path / "77")}
    shelved = bytes(31) + b"\x77"
    done = fill(storage, [key, shelved, KEYS[2]])
    assert done == [False, kind == "directory", True]
    assert storage.exists([key]) == 0
    assert storage.get([key], [page(key)]) == [False]
    storage.delete([key, shelved])
    fill(storage, KEYS[2:])
    for arguments in (["ls"], ["verify", "--delete"], ["prune", "--days", 0]):
        assert run(arguments[0], tmp_path, *arguments[1:]).exit_code == 0
    assert {each: os.lstat(each).st_ino for each in before} == before


@pytest.mark.parametrize("name", [owned.MARKER, "new", "lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_it_needs_is_taken(tmp_path, kind, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name != owned.MARKER:
        (tmp_path / owned.MARKER).touch()
    dict(entries(tmp_path))[kind](tmp_path / name)
    if (kind, name) == ("directory", "new"):
        assert fill(made(tmp_path))
        return
    with pytest.raises(ConfigError, match=rf"{name} must be a (file|directory).*: remove that"):
        made(tmp_path)


def test_what_it_makes_is_private(tmp_path):
    before = os.umask(0)
    try:
        storage = made(tmp_path / "pages", limit=5 * (HEADER + 50))
        fill(storage)
    finally:
        os.umask(before)
    found = [tmp_path / "pages", *(tmp_path / "pages").rglob("*")]
    assert len(found) > 8
    for each in found:
        mode = stat.S_IMODE(os.lstat(each).st_mode)
        assert mode == (0o700 if each.is_dir() else 0o600), each


def test_two_processes_claim_one_directory(tmp_path):
    """Both claim it at once, while it is empty or not there."""
    source = (
        "import os, sys, time; sys.path[:0] = [sys.argv[1]]\n"
        "from test_foreign import made\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for n in range(200): made(f'{sys.argv[2]}/{n}')\n"
    )
    command = [sys.executable, "-c", source, os.path.dirname(__file__), str(tmp_path)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for each in both:
        assert each.stdout.readline() == "ready\n"
    for each in both:
        each.stdin.write("\n")
        each.stdin.flush()
    assert [each.communicate(timeout=60)[0] for each in both] == ["", ""]
    assert [each.returncode for each in both] == [0, 0]


def test_commands_make_nothing(tmp_path):
    for arguments in (["ls"], ["verify", "--delete"], ["prune", "--days", 0]):
        assert run(arguments[0], tmp_path, *arguments[1:]).exit_code == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("days", ["nan", "inf", "-inf", "-1", "1e300", "much"])
def test_days_are_a_number(tmp_path, days):
    fill(made(tmp_path))
    assert run("prune", tmp_path, "--days", days).exit_code == 2
    assert made(tmp_path).exists(KEYS) == len(KEYS)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/tmp/\0", "a path has no character 0"),
        ("/tmp/\ud800", "surrogates not allowed"),
        ("~nobody-has-this-name/pages", "nobody of this name has a home directory"),
        ("", "set it in params"),
    ],
)
def test_paths_that_mean_nothing_are_refused(path, reason):
    with pytest.raises(ConfigError, match=rf"path of files .*{reason}"):
        made(path)


def test_a_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fill(made("~/pages"))
    assert made(tmp_path / "pages").exists(KEYS) == len(KEYS)
    assert not (tmp_path / "~").exists()
