"""Kinds of storage as tests see them: a server that can be hurt in every way, and its URL."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import obstore
import pytest
import redis

from stepwell.core.keys import Key
from stepwell.core.record import pad_to_page
from stepwell.tiers.media.object_stores import open_store
from stepwell.tiers.media.records import name_of
from stepwell.tiers.media.urls import MediumUrl

from .mooncake_pool import Pool, change
from .mounts import own_namespace, unmount
from .namespace import own_network
from .object_servers import KEY_ID, SECRET, moto
from .servers import Server, free_port, redis_server

NO_NIXL = "NIXL is missing: scripts/env has it on x86-64"


class Site(Protocol):
    """A place of one kind, with a real server behind it."""

    url: str

    def start(self) -> None:
        """Start the server; what it kept before is there if the kind is durable."""
        ...

    def start_empty(self) -> None:
        """Start the server, with nothing in it."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...

    def pause(self) -> None:
        """SIGSTOP."""
        ...

    def resume(self) -> None:
        """SIGCONT."""
        ...

    def change(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        """Change what is stored under a key."""
        ...

    def close(self) -> None:
        """End it, whatever state it is in."""
        ...


class _OneServer:
    """What is done to a site's only server."""

    _server: Server

    def kill(self) -> None:
        self._server.kill()

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()


class RedisSite(_OneServer):
    """A Redis that keeps nothing when it ends."""

    def __init__(self, folder: Path) -> None:
        self._server, self._port = redis_server(folder)
        self.url = f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server.start()

    def start_empty(self) -> None:
        self._server.start()

    def change(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        with redis.Redis(port=self._port) as client:
            name = ":".join(("stepwell", *name_of(key)))
            stored = client.get(name)
            assert isinstance(stored, bytes)
            client.set(name, change(stored))

    def close(self) -> None:
        self._server.kill()


class FsSite(_OneServer):
    """A pool on a file system that is a process: what hurts it hurts whoever has it mounted.

    A process that is killed leaves a mount that answers with errors; one that is stopped, calls
    that do not return. What is behind it stays.
    """

    def __init__(self, folder: Path, name: str = "mounted", *, cached_s: float = 0.0) -> None:
        """``name`` of the mount, and how long its clients believe what they have looked up."""
        self._behind, self._mounted = folder / "behind", folder / name
        self._behind.mkdir(exist_ok=True)
        self._mounted.mkdir()
        options = ",".join(f"{what}_timeout={cached_s}" for what in ("attr", "entry", "negative"))
        self._server = Server(
            ["bindfs", "-f", "--multithreaded", "-o", options,
             str(self._behind), str(self._mounted)],
            lambda: os.path.ismount(self._mounted), folder / f"{name}.log",
        )  # fmt: skip
        self.url = f"fs://{self._mounted}/pool?capacity=64MiB&min_free=1MiB"

    def start(self) -> None:
        own_namespace()
        unmount(self._mounted)
        self._server.start()

    def start_empty(self) -> None:
        shutil.rmtree(self._behind / "pool/chunks", ignore_errors=True)
        self.start()

    def change(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        (found,) = (self._behind / "pool/chunks").rglob(name_of(key)[1])
        changed = change(found.read_bytes())
        # A record that is as long as it says is padded.
        found.write_bytes(changed + bytes(pad_to_page(len(changed)) - len(changed)))

    def close(self) -> None:
        self._server.kill()
        unmount(self._mounted)


def _need_nixl() -> None:
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip(NO_NIXL)


class NixlSite(FsSite):
    """The same by NIXL."""

    def __init__(self, folder: Path) -> None:
        _need_nixl()
        super().__init__(folder)
        self.url = "nixl+posix" + self.url.removeprefix("fs")


class ThreeFsSite(FsSite):
    """The same as 3FS without its library."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = "3" + self.url


class S3Site(_OneServer):
    """S3 as moto plays it, which keeps nothing when it ends."""

    def __init__(self, folder: Path) -> None:
        self._objects = moto(folder, free_port())
        self._server = self._objects.server
        self.url = self._objects.url("failures")
        self._env = pytest.MonkeyPatch()
        self._env.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        self._env.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def start(self) -> None:
        self._server.start()
        self._objects.make_bucket()

    def start_empty(self) -> None:
        self.start()

    def change(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        store, name = open_store(MediumUrl.parse(self.url), 30.0), "/".join(name_of(key))
        stored = bytes(obstore.get(store, name).bytes())
        obstore.put(store, name, change(stored))

    def close(self) -> None:
        self._server.kill()
        self._env.undo()


class NixlObjectsSite(S3Site):
    """The same by NIXL."""

    def __init__(self, folder: Path) -> None:
        _need_nixl()
        super().__init__(folder)
        self._direct = self.url
        self.url = "nixl+obj" + self.url.removeprefix("s3")

    def change(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        store, name = open_store(MediumUrl.parse(self._direct), 30.0), "/".join(name_of(key))
        obstore.put(store, name, change(bytes(obstore.get(store, name).bytes())))


class MooncakeSite:
    """A master and its nodes, all of them hurt alike; what they keep is gone when they end.

    Args:
        folder: for logs.
        nodes, node_bytes: of its memory.
        ttl_s: for how long a node may be silent until what it keeps is given up.
        parameters: of the URL.
        options: of the master.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 1,
        node_bytes: int = 256 << 20,
        ttl_s: int = 60,
        parameters: str = "",
        options: Sequence[str] = (),
    ) -> None:
        self.pool = Pool(folder, nodes, node_bytes, [f"--client_ttl={ttl_s}", *options])
        self.url = self.pool.url + parameters
        self._network = contextlib.ExitStack()
        self._network.enter_context(own_network())

    def start(self) -> None:
        self.pool.start()

    def start_empty(self) -> None:
        self.pool.start()

    def kill(self) -> None:
        self.pool.kill()

    def pause(self) -> None:
        for server in self.pool.servers:
            server.pause()

    def resume(self) -> None:
        for server in self.pool.servers:
            server.resume()

    def change(self, key: Key, how: Callable[[bytes], bytes]) -> None:
        client = self.pool.client()
        try:
            change(client, key, how)
        finally:
            client.close()

    def close(self) -> None:
        try:
            self.pool.kill()
        finally:
            self._network.close()


SITES: dict[str, Callable[[Path], Site]] = {
    "3fs": ThreeFsSite,
    "fs": FsSite,
    "mooncake": MooncakeSite,
    "nixl+obj": NixlObjectsSite,
    "nixl+posix": NixlSite,
    "redis": RedisSite,
    "s3": S3Site,
}
