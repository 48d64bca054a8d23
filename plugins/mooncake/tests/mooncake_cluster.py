"""A real store on this machine: a master, and processes that give memory to it.

Both are programs of Mooncake's package.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from topkv_mooncake.library import MOONCAKE

START_S = 60.0


def missing():
    """Return why there can be no store here; None where there can."""
    library, tried = MOONCAKE.first()
    if library is None:
        return f"{MOONCAKE.missing}; {'; '.join(tried)}"
    return None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program(name):
    """The path of a program of the package, which may be executed."""
    path = Path(find_spec("mooncake").submodule_search_locations[0]) / name
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class Cluster:
    """A master, and what gives memory to it.

    Args:
        folder: where the programs write their logs.
        flags: of the master.
    """

    def __init__(self, folder, *flags):
        self.folder, self.flags = Path(folder), flags
        self.port, self.admin = free_port(), free_port()
        self.holders, self.master = [], None
        self.start_master()

    @property
    def params(self):
        """Parameters of a storage over this store."""
        return {"master": f"127.0.0.1:{self.port}", "admin": f"127.0.0.1:{self.admin}"}

    def _start(self, log, *command):
        with open(self.folder / log, "ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def start_master(self):
        self.master = self._start(
            "master.log",
            program("mooncake_master"),
            f"--rpc_port={self.port}",
            f"--metrics_port={self.admin}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            "--client_ttl=3",
            *self.flags,
        )
        self._wait(self.master, "master.log", self.port, self.admin)

    def hold(self, size="64 MB"):
        """Start a process that gives memory."""
        port = free_port()
        log = f"holder-{len(self.holders)}.log"
        holder = self._start(
            log,
            program("mooncake_client"),
            "--host=127.0.0.1",
            f"--port={port}",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address=127.0.0.1:{self.port}",
            f"--global_segment_size={size}",
        )
        self.holders.append(holder)
        self._wait(holder, log, port)
        return holder

    def _wait(self, process, log, *ports):
        """Wait until a process listens at its ports."""
        end = time.monotonic() + START_S
        for port in ports:
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    text = (self.folder / log).read_text(errors="replace")
                    raise RuntimeError(f"{process.args} did not start:\n{text[-3000:]}")
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.02)

    def kill(self, process):
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self):
        for process in [*self.holders, self.master]:
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
