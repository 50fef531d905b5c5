"""A vLLM server of our own: started on the loopback, watched, and always stopped.

The server gets its own process group; whatever happens, the whole group is stopped, and the
shared-memory files and sockets that vLLM leaves behind when it is stopped are removed.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import stepwell
from stepwell.bench import procs
from stepwell.bench.prometheus import Metrics, parse_metrics
from stepwell.errors import StepwellError

HOST = "127.0.0.1"
_LOG_TAIL_LINES = 25
_POLL_S = 0.1
_SIGNAL_GRACE_S = 20.0
_KILL_GRACE_S = 10.0


class ServerError(StepwellError):
    """The server did not start, died, or does not answer."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to start one server.

    Attributes:
        model: directory of the model.
        kv_cache_gib: device KV space, GiB (host memory on the CPU backend), at least 1.
        max_model_len: longest sequence, tokens.
        log_path: file that receives stdout and stderr.
        kv_transfer_config: value of --kv-transfer-config, or None for no connector.
        dtype: of weights and activations.
        max_num_seqs: sequences computed together.
        threads: OpenMP threads per worker.
        port: TCP port, or None for a free one.
        extra_args: more arguments for the server's command line.
        extra_env: more environment variables; they win.
        start_timeout_s: longest wait until the server answers.
    """

    model: Path
    kv_cache_gib: int
    max_model_len: int
    log_path: Path
    kv_transfer_config: Mapping[str, object] | None = None
    dtype: str = "float32"
    max_num_seqs: int = 8
    threads: int = 1
    port: int | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0


class Server:
    """One running server, a context manager.

    Threading: not thread-safe. Blocks while starting (tens of seconds) and stopping.
    Errors: `ServerError` with the end of the log when the server does not come up.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = config.port or free_port()
        self.base_url = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._shm_files: set[Path] = set()
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)  # on KeyboardInterrupt too: nothing may stay behind
            self.start()
            stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process, which is also its process group."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def start(self) -> None:
        """Starts the process and waits until it answers.

        Raises:
            ServerError: it ended early, or was not ready within `start_timeout_s`.
        """
        config = self.config
        config.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Not beside the log: the path of a socket has about a hundred characters at most.
        self._sockets = tempfile.TemporaryDirectory(prefix="stepwell-", ignore_cleanup_errors=True)
        with config.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                _command(config, self.port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(config, self._sockets.name),
                cwd=config.log_path.parent,  # never a folder whose modules shadow others
                start_new_session=True,
            )
        self._wait_until_ready(self._process)

    def stop(self) -> None:
        """Stops the whole group: SIGTERM, after a grace period SIGKILL. Safe to call again."""
        process = self._process
        if process is None:
            return
        self._note_shm_files()
        self._signal(process, signal.SIGTERM)
        gone = False
        try:
            gone = self._wait_until_gone(process, _SIGNAL_GRACE_S)
        finally:  # a second interrupt ends the waiting, not the cleaning up
            if not gone:
                self._signal(process, signal.SIGKILL)
        if not gone:
            self._wait_until_gone(process, _KILL_GRACE_S)
        self._process = None
        procs.remove_stale(self._shm_files)
        self._shm_files = set()
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None

    def kill(self) -> None:
        """Ends the whole group by SIGKILL, as a crash would, and cleans up."""
        if self._process is not None:
            self._note_shm_files()
            self._signal(self._process, signal.SIGKILL)
        self.stop()

    def metrics(self) -> Metrics:
        """Reads /metrics.

        Raises:
            ServerError: the server does not answer.
        """
        return parse_metrics(self._request("/metrics"))

    def reset_prefix_cache(self, *, external: bool = False, timeout_s: float = 30.0) -> None:
        """Empties the device prefix cache, with `external` also the engine's host pool.

        Raises:
            ServerError: the engine did not do it in time.
        """
        path = "/reset_prefix_cache" + ("?reset_external=true" if external else "")
        deadline = time.monotonic() + timeout_s
        while not json.loads(self._request(path, method="POST")).get("success"):
            if time.monotonic() > deadline:
                raise ServerError(f"the prefix cache was not emptied: timeout_s={timeout_s:g}")
            time.sleep(_POLL_S)

    def read_bytes_physical(self) -> int:
        """Bytes that all processes of the server had storage read, see `procs`."""
        return procs.read_bytes_physical(self.pid)

    def log_tail(self) -> str:
        """The last lines of the log."""
        try:
            text = self.config.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.config.start_timeout_s
        while True:
            if process.poll() is not None:
                raise ServerError(
                    f"vLLM ended while starting: exit_status={process.returncode} "
                    f"log={self.config.log_path}\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"vLLM was not ready in time: timeout_s={self.config.start_timeout_s:g} "
                    f"log={self.config.log_path}\n{self.log_tail()}"
                )
            self._note_shm_files()
            with contextlib.suppress(ServerError):
                self._request("/health", timeout_s=2.0)
                return
            time.sleep(_POLL_S)

    def _request(self, path: str, *, method: str = "GET", timeout_s: float = 30.0) -> str:
        request = urllib.request.Request(self.base_url + path, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as response:
                body: bytes = response.read()
        except (OSError, urllib.error.URLError) as error:
            raise ServerError(f"the server does not answer: path={path} error={error}") from error
        return body.decode()

    def _note_shm_files(self) -> None:
        if self._process is not None:
            self._shm_files |= procs.offload_files(procs.group_pids(self._process.pid))

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    @staticmethod
    def _wait_until_gone(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while process.poll() is None or procs.group_pids(process.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _command(config: ServerConfig, port: int) -> list[str]:
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(config.model), "--served-model-name", "demo",
        "--host", HOST, "--port", str(port), "--uvicorn-log-level", "warning",
        "--dtype", config.dtype, "--seed", "0", "--generation-config", "vllm",
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs),
        "--enforce-eager",  # no compiler needed, and it starts at once
        "--gpu-memory-utilization", "0.1",  # checked at start, though the size is set
        *config.extra_args,
    ]  # fmt: skip
    if config.kv_transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(config.kv_transfer_config)]
    return command


def _environment(config: ServerConfig, sockets: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": _python_path(),
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        # Binding would pin two engines to the same cores, and spinning barriers of several
        # threads are slow on a machine shared with others.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_RPC_BASE_PATH": sockets,
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache; the server is on the loopback
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **config.extra_env,
    }


def _python_path() -> str:
    """PYTHONPATH by which the server finds this very Stepwell, also from a plain checkout."""
    folder = Path(stepwell.__file__).resolve().parent.parent
    old = os.environ.get("PYTHONPATH", "")
    if folder.name in ("site-packages", "dist-packages"):
        return old  # it is found anyway, and must not come before the standard library
    return os.pathsep.join(part for part in (str(folder), old) if part)


def free_port() -> int:
    """Returns a TCP port of the loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
