"""Real servers on loopback for tests: started, watched, hurt, and always ended."""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

READY_S = 30.0
SERVERS = Path(__file__).resolve().parents[2] / ".cache" / "servers"
"""Where `scripts/servers` puts what is not on the PATH."""
UNPACKED = SERVERS / "root"
INSTALLED = SERVERS / "venv" / "bin"


def program(name: str) -> str:
    """A server's program, on the PATH or where `scripts/servers` has put it."""
    folders = [UNPACKED / "usr" / "bin", UNPACKED / "usr" / "sbin", INSTALLED]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))
    if found is None:
        pytest.skip(f"{name} is missing: run scripts/servers, or install it")
    return found


def surroundings(name: str) -> dict[str, str]:
    """The environment in which a program finds its libraries."""
    if not program(name).startswith(str(UNPACKED)):
        return dict(os.environ)
    folders = [*UNPACKED.glob("usr/lib/*-linux-gnu"), *UNPACKED.glob("lib/*-linux-gnu")]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}


def run(name: str, *arguments: str) -> None:
    """Run a program to its end."""
    command = [program(name), *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=surroundings(name))


_given_out: set[int] = set()


def free_port() -> int:
    """A port of loopback that nobody listens on just now, another each time.

    Below those that the system gives to connections (ip_local_port_range): what is told of is used
    a while later.
    """
    for _ in range(1000):
        port = random.SystemRandom().randrange(20_000, 32_000)
        if port not in _given_out:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                _given_out.add(port)
                return port
    raise AssertionError("there is no free port")


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Server:
    """A process of a server. A context manager that ends it, also if it hangs.

    Args:
        command: what to run.
        ready: says whether it answers; may raise OSError while it does not.
        log: where its output goes.
        env: besides the environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        ready: Callable[[], bool],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        name, *arguments = command
        self._command = [program(name), *arguments]
        self._ready = ready
        self._log = log
        self._env = {**surroundings(name), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._env,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - nothing but a system call
            )
        give_up_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError):
                if self._ready():
                    return
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                words = self._log.read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"{self._command[0]} does not start: {words}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and says nothing.

        The signal is sent before it is obeyed: of a server with 22 threads some went on, and
        answered, in every other case on a busy machine.
        """
        self._signal(signal.SIGSTOP)
        give_up_s = time.monotonic() + READY_S
        while not self._is_stopped():
            assert time.monotonic() < give_up_s, "it does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _is_stopped(self) -> bool:
        """Whether all of its threads are, by /proc (proc(5), stat: the state follows the name)."""
        assert self._process is not None
        for stat in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if stat.read_text().rpartition(")")[2].split()[0] != "T":
                    return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def answers_on(port: int, ask: bytes = b"", *expect: bytes) -> Callable[[], bool]:
    """Whether somebody on a port of loopback answers what is asked."""

    def ready() -> bool:
        with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
            if ask:
                connection.settimeout(1.0)
                connection.sendall(ask)
                return connection.recv(100).startswith(expect)
        return True

    return ready


def redis_server(folder: Path, *options: str, port: int = 0) -> tuple[Server, int]:
    """A Redis on loopback that keeps nothing on disk, and its port; not started yet."""
    port = port or free_port()
    command = [
        "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "",
        "--appendonly", "no", "--dir", str(folder), *options,
    ]  # fmt: skip
    server = Server(
        command, answers_on(port, b"PING\r\n", b"+PONG", b"-NOAUTH"), folder / "redis.log"
    )
    return server, port
