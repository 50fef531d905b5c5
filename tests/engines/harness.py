"""Running real engines from tests: a process per life, killed and cleaned up whatever happens."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepwell.core.keys import Key
from stepwell.core.record import Header
from stepwell.engines.vllm_args import kv_transfer_config
from stepwell.ops.shm import SHM_DIR, find_abandoned
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.frames import replay
from stepwell.tiers.slots import slot_of

BLOCK_TOKENS = 128


class EngineError(Exception):
    """The driver could not do what it was asked."""


class EngineProcess:
    """A `driver.py` process. A context manager that ends it, with everything it started."""

    def __init__(self, log: Path, env: dict[str, str] | None = None) -> None:
        self._began_s = time.time()
        ours, theirs = socket.socketpair()
        self._sockets = tempfile.TemporaryDirectory(prefix="stepwell-", ignore_cleanup_errors=True)
        self._log = open(log, "ab")  # noqa: SIM115 - closed in `close`
        self._log_path = log
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **os.environ,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_RPC_BASE_PATH": self._sockets.name,
                **(env or {}),
            },
        )
        theirs.close()
        ours.settimeout(300)
        self._socket = ours
        self._stream = ours.makefile("rw", encoding="utf-8")

    def call(self, do: str, **arguments: Any) -> Any:
        """Have the driver do something; raises EngineError with its words if it cannot."""
        try:
            self._stream.write(json.dumps({"do": do, **arguments}) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError as error:
            raise EngineError(f"the engine's process is gone: {error}") from error
        if not line:
            raise EngineError(f"the engine's process ended: {self.log()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["ok"]

    def start(self, model: Path, transfer: dict[str, Any] | None, **options: Any) -> None:
        """Start an engine in the process."""
        self.call("start", model=str(model), transfer=transfer, **options)

    def answers(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Token ids of greedy answers."""
        return [a["ids"] for a in self.call("generate", prompts=prompts, **options)]

    def count(self, name: str, **labels: str) -> int:
        """Sum of a counter over all series with these labels."""
        total = 0
        for series, value in self.call("counters").items():
            series_name, _, rest = series.partition("{")
            found = dict(pair.split("=") for pair in rest.rstrip("}").split(",") if pair)
            if series_name == name and labels.items() <= found.items():
                total += value
        return total

    def stop(self) -> None:
        """Shut the engine down; the process lives on for the next one."""
        self.call("stop")

    def kill(self) -> None:
        """SIGKILL, at once, the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        """What the process printed so far."""
        return self._log_path.read_text(errors="replace")

    def close(self) -> None:
        """End the process and everything it started: in an orderly way if it can."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()
        self._log.close()
        self._sockets.cleanup()
        # vLLM's host memory keeps its name in /dev/shm if an engine ends while it starts.
        for left in find_abandoned(SHM_DIR):
            if left.changed_s >= self._began_s:
                Path(left.path).unlink(missing_ok=True)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def transfer_config(path: Path, capacity: str = "256MiB", **settings: object) -> dict[str, Any]:
    """The configuration of the CPU backend over a store at ``path``.

    Everything is read: a model this small is computed sooner than read on a busy machine.
    """
    primary = str(settings.pop("primary", "64MiB"))
    return kv_transfer_config(
        str(path),
        capacity,
        primary=primary,
        cpu=True,
        settings={"min_free": "1MiB", "read_when": "always", **settings},
    )


def shared_config(url: str, **settings: object) -> dict[str, Any]:
    """The same over storage that engines share, without a drive."""
    primary = str(settings.pop("primary", "64MiB"))
    everything = {"read_when": "always", **settings}
    return kv_transfer_config(url=url, primary=primary, cpu=True, settings=everything)


def prompt(seed: int, num_tokens: int) -> list[int]:
    """A prompt of seeded random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(num_tokens)]


@dataclass(frozen=True)
class Record:
    """Where a record of a store lies."""

    extent: Path
    offset: int
    size_bytes: int
    key: Key
    end_token: int

    def read(self) -> bytes:
        """Its bytes, header and payload."""
        with open(self.extent, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size_bytes)

    def write(self, offset: int, content: bytes) -> None:
        """Write over a part of it."""
        with open(self.extent, "r+b") as file:
            file.seek(self.offset + offset)
            file.write(content)


def records(path: Path) -> list[Record]:
    """The records of a store that its journal names, in the order of their places."""
    if not (path / "journal").exists():
        return []
    extents = {found.extent_id: found for found in StoreDirectory(path).find_extents()}
    found = []
    for place in sorted(replay((path / "journal").read_bytes()).rows["place"].tolist()):
        extent_id, slot_idx = slot_of(place)
        extent = extents[extent_id]
        offset = slot_idx * extent.slot_bytes
        record = Record(Path(extent.path), offset, extent.slot_bytes, Key(b""), 0)
        header = Header.unpack(record.read())
        found.append(replace(record, key=header.key, end_token=header.end_token))
    return found
