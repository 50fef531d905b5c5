"""A real Mooncake on loopback of a network of its own: a master, and nodes that give memory."""

import importlib
import importlib.util
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import Key
from stepwell.tiers.media.records import name_of

from .servers import Server, answers_on, free_port

# Of the library in this process, whichever test is the first to load it.
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "3000")
os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", "3000")
os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", "3")
os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "3")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

NODE = Path(__file__).with_name("mooncake_node.py")
QUIET = {"MC_LOG_LEVEL": "WARNING", "MC_STORE_CLIENT_SETUP_RETRIES": "3"}


def installed() -> Path:
    """Where the library is."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mooncake is missing: pip install 'stepwell[mooncake]'")
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"mooncake cannot be loaded: run scripts/servers, then scripts/test ({error})")
    return Path(next(iter(found.submodule_search_locations)))


class Pool:
    """A master and its nodes. A context manager that ends all of them.

    Args:
        folder: for logs.
        nodes: how many.
        node_bytes: that each gives.
        options: of the master.
    """

    def __init__(
        self, folder: Path, nodes: int = 1, node_bytes: int = 256 << 20, options: Any = ()
    ) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"mooncake://{self.address}"
        self._folder = folder
        self._node_bytes = node_bytes
        ports = [answers_on(port) for port in (self.port, self.metrics_port)]
        self.master = Server(
            [str(installed() / "mooncake_master"), "--rpc_address=127.0.0.1",
             f"--rpc_port={self.port}", "--rpc_thread_num=2", "--metrics_host=127.0.0.1",
             f"--metrics_port={self.metrics_port}", "--logtostderr=1", *options],
            lambda: all(answers() for answers in ports), folder / "master.log",
        )  # fmt: skip
        self.nodes = [self._node(idx) for idx in range(nodes)]

    def _node(self, idx: int) -> Server:
        ready = self._folder / f"node{idx}.ready"
        command = [
            sys.executable, str(NODE), self.address, "127.0.0.1", str(ready), str(self._node_bytes),
        ]  # fmt: skip

        def is_ready() -> bool:
            # Taken away once it is seen, so that it is the next one's that is waited for.
            ready.unlink()
            return True

        return Server(command, is_ready, self._folder / f"node{idx}.log", QUIET)

    @property
    def servers(self) -> list[Server]:
        """All of them, the master first."""
        return [self.master, *self.nodes]

    def start(self) -> None:
        """Start all of them."""
        for server in self.servers:
            server.start()

    def kill(self) -> None:
        """SIGKILL, all of them."""
        for server in self.servers:
            server.kill()

    def ask(self, path: str) -> bytes:
        """Of the master's own server."""
        address = f"http://127.0.0.1:{self.metrics_port}/{path}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            content: bytes = answer.read()
            return content

    def names(self) -> list[str]:
        """Of all objects."""
        text = self.ask("get_all_keys").decode()
        return json.loads(text) if text.startswith("[") else text.split()

    def client(self, tenant: str = "default") -> Any:
        """A client of the library, not ours."""
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        code = client.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, 32 << 20, "tcp", "", self.address, tenant_id=tenant
        )
        assert code == 0
        return client

    def __enter__(self) -> "Pool":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def change(client: Any, key: Key, how: Callable[[bytes], bytes], prefix: str = "stepwell") -> None:
    """Change what is stored under a key."""
    name = "/".join((prefix, *name_of(key)))
    stored = client.get(name)
    assert stored
    changed = how(stored) or b"\0"  # it keeps nothing that is empty
    assert client.remove(name, True) == 0
    assert client.put(name, changed) == 0
