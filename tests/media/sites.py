"""Kinds of storage as tests see them: a server that can be hurt in every way, and its URL."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import redis

from stepwell.core.keys import Key
from stepwell.tiers.media.records import name_of

from .servers import redis_server


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


class RedisSite:
    """A Redis that keeps nothing when it ends."""

    def __init__(self, folder: Path) -> None:
        self._server, self._port = redis_server(folder)
        self.url = f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server.start()

    def start_empty(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def change(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        with redis.Redis(port=self._port) as client:
            name = ":".join(("stepwell", *name_of(key)))
            stored = client.get(name)
            assert isinstance(stored, bytes)
            client.set(name, change(stored))

    def close(self) -> None:
        self._server.kill()


SITES: dict[str, Callable[[Path], Site]] = {"redis": RedisSite}
