"""Doctor on attaching: figures that are measured here, and reasons read from the system."""

from __future__ import annotations

import json
import mmap
import os
import resource

import pytest
import torch
from click.testing import CliRunner

from topkv.errors import HostMemoryError
from topkv.kv.host_mapping import HostMapping
from topkv_cli import attaching, probes
from topkv_cli.group import topkv as command

GIB = 1 << 30
CORE = min(os.sched_getaffinity(0))


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes the files in which a system reports on itself; 80 MiB are available."""
    for name in ("_SYS", "_PROC"):
        monkeypatch.setattr(probes, name, tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 999999 kB\nMemAvailable: 81920 kB\n")

    def huge_pages(enabled):
        folder = tmp_path / "kernel/mm/transparent_hugepage"
        folder.mkdir(parents=True)
        (folder / "enabled").write_text(enabled)
        (folder / "hpage_pmd_size").write_text("2097152\n")

    return huge_pages


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("system", "no_gpu")
def test_an_eighth_of_the_free_memory_is_measured():
    report = attaching.attaching(pool=3 * GIB)
    assert report["probe_bytes"] == 10 << 20
    assert 1 <= report["threads"] <= min(16, report["cores"])
    assert report["touch_seconds_per_gib"] > 0
    assert report["touch_seconds_per_gib_without_huge_pages"] > 0
    assert report["seconds_per_gib"] == report["touch_seconds_per_gib"]
    assert report["register_seconds_per_gib"] == "no CUDA device"
    assert report["pool_bytes"] == 3 * GIB
    assert report["pool_seconds"] == pytest.approx(3 * report["seconds_per_gib"], abs=0.06)
    assert "the pool does not fit: 0.08 GiB are available" in report["why"]


@pytest.mark.usefixtures("system", "no_gpu")
def test_without_a_pool_none_is_reported():
    report = attaching.attaching()
    assert "pool_bytes" not in report
    assert not any("does not fit" in why for why in report["why"])


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("enabled", "read", "why"),
    [
        ("always [madvise] never\n", "madvise", "given where they are asked for"),
        ("[always] madvise never\n", "always", "given where they are asked for"),
        ("always madvise [never]\n", "never", "are off: write madvise to /sys/kernel/mm"),
        (None, None, "no transparent huge pages"),
    ],
)
def test_huge_pages_are_looked_up(system, enabled, read, why):
    if enabled:
        system(enabled)
    assert probes.huge_pages() == {"enabled": read, "page_bytes": 2097152 if enabled else None}
    assert any(why in sentence for sentence in attaching.attaching()["why"])


@pytest.mark.usefixtures("system", "no_gpu")
@pytest.mark.parametrize(
    ("limit", "pool", "reported"),
    [
        (1 << 20, None, True),
        (2 * GIB, None, False),
        (2 * GIB, 3 * GIB, True),
        (4 * GIB, 3 * GIB, False),
        (resource.RLIM_INFINITY, 3 * GIB, False),
    ],
)
def test_a_limit_of_locked_memory_is_reported_where_it_is_in_the_way(
    monkeypatch, limit, pool, reported
):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    why = attaching.attaching(pool)["why"]
    assert any(f"the limit of locked memory is {limit} bytes" in one for one in why) == reported


def test_the_probe_is_touched_and_let_go(monkeypatch):
    done = []
    for name in ("advise", "touch", "discard"):
        real = getattr(HostMapping, name)

        def note(self, *args, name=name, real=real):
            done.append((name, len(self), *args))
            real(self, *args)

        monkeypatch.setattr(HostMapping, name, note)
    size = 3 * mmap.PAGESIZE
    times = attaching.measure(size, torch.device("cpu"), {CORE}, huge=False)
    assert done == [("advise", size, False), ("touch", size, {CORE}), ("discard", size)]
    assert times["register"] is None
    assert min(times["map"], times["touch"]) > 0


def test_a_refused_registration_says_so(monkeypatch):
    """And the probe is let go all the same."""
    gone = []
    monkeypatch.setattr(HostMapping, "register", lambda self: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(HostMapping, "discard", lambda self: gone.append(len(self)))
    with pytest.raises(HostMemoryError, match="cudaHostRegister of 4096 bytes failed with code 2"):
        attaching.measure(4096, torch.device("cuda"), {CORE}, huge=True)
    assert gone == [4096]


@pytest.mark.parametrize("size", ["64XB", "-1", "0"])
def test_a_size_that_is_none_is_refused(size):
    done = CliRunner().invoke(command, ["doctor", "--pool", size])
    assert done.exit_code == 2
    assert "must be a positive number of bytes or a size like '64GiB'" in done.stderr


def test_doctor_takes_the_size_of_a_pool(monkeypatch):
    monkeypatch.setattr(attaching, "_PROBE", 1 << 20)
    done = CliRunner().invoke(command, ["doctor", "--json", "--pool", "1.5GiB"])
    assert json.loads(done.stdout)["attaching"]["pool_bytes"] == 3 * GIB // 2


@pytest.mark.gpu
def test_registering_is_measured_where_there_is_a_gpu():
    report = attaching.attaching(pool=GIB)
    assert report["register_seconds_per_gib"] > 0
    total = report["touch_seconds_per_gib"] + report["register_seconds_per_gib"]
    assert report["seconds_per_gib"] == pytest.approx(total, abs=0.002)


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 279), ("aarch64", 239)])
def test_each_machine_has_its_own_system_call(monkeypatch, machine, number):
    asked = []

    class Library:
        def syscall(self, *args):
            asked.append(args[0])
            return -1

    monkeypatch.setattr(probes.platform, "machine", lambda: machine)
    monkeypatch.setattr(probes.ctypes, "CDLL", lambda *args, **kwargs: Library())
    assert probes.numa_node_of(0) is None
    assert asked == [number]


def test_a_machine_that_nobody_looked_up_is_not_asked(monkeypatch):
    monkeypatch.setattr(probes.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(probes.ctypes, "CDLL", None)
    assert probes.numa_node_of(0) is None
