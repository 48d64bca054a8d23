"""A real server on this machine."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

START_S = 60.0
PROGRAM = shutil.which("redis-server")
MISSING = None if PROGRAM else "there is no redis-server here: apt-get install redis-server"


class Server:
    """A server that listens at a socket in a folder, or at a port.

    Args:
        folder: of its socket and log.
        flags: further ones.
        port: where it listens; 0 for the socket alone.
    """

    def __init__(self, folder, *flags, port=0):
        self.folder, self.flags, self.port = Path(folder), flags, port
        self.process = None
        self.start()

    @property
    def path(self):
        return str(self.folder / "redis.sock")

    @property
    def params(self):
        """Parameters of a storage over this server."""
        return {"address": f"127.0.0.1:{self.port}" if self.port else f"unix:{self.path}"}

    def start(self):
        command = [PROGRAM, "--port", str(self.port), "--unixsocket", self.path, "--save", ""]
        command += ["--dir", str(self.folder), "--bind", "127.0.0.1", *self.flags]
        with open(self.folder / "redis.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None or time.monotonic() > end:
                text = (self.folder / "redis.log").read_text(errors="replace")
                raise RuntimeError(f"{command} did not start:\n{text[-3000:]}")
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(self.path)
                return
            except OSError:
                time.sleep(0.01)

    def kill(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def suspend(self):
        self.process.send_signal(signal.SIGSTOP)

    def wake(self):
        self.process.send_signal(signal.SIGCONT)
