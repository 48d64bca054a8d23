"""Memory that is left, of the system and of control groups of both versions."""

from __future__ import annotations

import pytest

from topkv_cli import probes
from topkv_cli.memory import host_memory

GIB = 1 << 30
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Machine:
    """A system of 64 GiB, 48 of them available, in files."""

    def __init__(self, root):
        self.proc, self.groups = root / "proc", root / "fs/cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB")

    def process(self, *lines):
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(self, path, names, limit, used, cached=0):
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        most, current, cache = names
        (folder / most).write_text(f"{limit}\n")
        (folder / current).write_text(f"{used * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{cache} {cached * GIB}\n")

    def look(self):
        return host_memory(self.proc, self.groups)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_control_groups_the_system_decides(machine):
    for lines in ((), ("0::/",), ("3:cpu:/a",)):
        machine.process(*lines)
        found = machine.look()
        assert (found.total, found.available, found.limit) == (64 * GIB, 48 * GIB, None)
    (machine.proc / "self/cgroup").unlink()
    assert machine.look().whose == "of the system"


@pytest.mark.parametrize(
    ("line", "below", "names"),
    [("0::/a/b", "", V2), ("4:cpuset,memory:/a/b", "memory/", V1)],
    ids=["v2", "v1"],
)
def test_the_tightest_group_around_the_process_decides(machine, line, below, names):
    machine.process("7:pids:/x", line)
    machine.group(f"{below}a/b", names, 24 * GIB, 4, cached=1)
    found = machine.look()
    assert (found.available, found.limit) == (21 * GIB, 24 * GIB)
    assert found.whose == f"of the control group {machine.groups / below / 'a/b'}"
    machine.group(f"{below}a", names, 30 * GIB, 20)
    assert machine.look().available == 10 * GIB
    machine.group(below, names, 8 * GIB, 9)  # what a container sees of itself
    assert machine.look().available == 0


@pytest.mark.parametrize("limit", ["max", 2**63 - 4096])
def test_a_group_without_a_limit_decides_nothing(machine, limit):
    machine.process("0::/a", "4:memory:/a")
    machine.group("a", V2, limit, 60)
    machine.group("memory/a", V1, limit, 60)
    assert machine.look().limit is None


def test_doctor_says_what_is_left_and_by_which_limit(machine, monkeypatch, tmp_path):
    machine.process("0::/a")
    machine.group("a", V2, 16 * GIB, 4)
    monkeypatch.setattr(probes, "_PROC", machine.proc)
    monkeypatch.setattr(probes, "_SYS", tmp_path)
    reported = probes.host_memory()
    assert reported == {
        "total_bytes": 64 * GIB,
        "available_bytes": 12 * GIB,
        "limit_bytes": 16 * GIB,
    }
