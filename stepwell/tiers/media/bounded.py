"""Sockets of redis-py that give up when a call's time is over, however often a byte comes."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from redis.connection import Connection, ConnectionPool

__all__ = ["BoundedPool", "bounded", "within"]

_call = threading.local()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What this thread sends and receives within it takes no longer than this, all together."""
    _call.give_up_s = time.monotonic() + seconds
    try:
        yield
    finally:
        _call.give_up_s = None


class _BoundedSocket:
    """A socket whose waiting ends with the call's time; its own timeout is of silence alone."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._silence_s = real.gettimeout()

    def recv_into(self, *args: Any) -> int:
        self._bound()
        count: int = self._real.recv_into(*args)
        return count

    def recv(self, size: int, *flags: int) -> bytes:
        if not flags:  # a look at what is there does not wait
            self._bound()
        content: bytes = self._real.recv(size, *flags)
        return content

    def sendall(self, *args: Any) -> None:
        self._bound()
        self._real.sendall(*args)

    def _bound(self) -> None:
        give_up_s = getattr(_call, "give_up_s", None)
        if give_up_s is None or self._real.gettimeout() == 0:
            return
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the call's time is over")
        silence_s = self._silence_s
        self._real.settimeout(left_s if silence_s is None else min(left_s, silence_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def bounded(connection_class: type[Any]) -> type[Any]:
    """The same kind of connection, over such sockets."""

    class Bounded(connection_class):  # type: ignore[misc]
        def _connect(self) -> Any:
            give_up_s = getattr(_call, "give_up_s", None)
            if give_up_s is None:
                return _BoundedSocket(super()._connect())
            # The handshake of TLS waits for as long as an answer may take.
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the call's time is over")
            names = ("socket_timeout", "socket_connect_timeout")
            given = {name: getattr(self, name) for name in names}
            for name, most_s in given.items():
                setattr(self, name, left_s if most_s is None else min(left_s, most_s))
            try:
                real = super()._connect()
            finally:
                for name, most_s in given.items():
                    setattr(self, name, most_s)
            real.settimeout(given["socket_timeout"])
            return _BoundedSocket(real)

    return Bounded


class BoundedPool(ConnectionPool):  # type: ignore[misc, unused-ignore]
    """A pool of such connections."""

    def __init__(self, connection_class: type[Any] = Connection, **options: Any) -> None:
        super().__init__(connection_class=bounded(connection_class), **options)
