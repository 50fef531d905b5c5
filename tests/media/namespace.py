"""A network of this process's own, with nothing but loopback, for servers that listen everywhere.

A socket belongs to the namespace of the thread that makes it, and a thread or child begins in that
of its maker. So it is enough that the main thread goes in and out.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import socket
import struct
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


@functools.cache
def _places() -> tuple[int, int]:
    """Descriptors of the namespace that we come from, and of the one of our own.

    One for the whole process: a library keeps the threads that it once began. So this module must
    have one name, `media.namespace`, whoever imports it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _enter(outside)  # whether there is a way back
        if libc.unshare(_CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    except OSError:
        os.close(outside)
        raise
    inside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            up = struct.pack("16sh14x", b"lo", _IFF_UP)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)
    finally:
        _enter(outside)
    return outside, inside


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Within it this thread, and what it begins, has a network that nobody else sees."""
    try:
        outside, inside = _places()
    except OSError as error:
        pytest.skip(
            f"Mooncake listens on all interfaces, and a network namespace for it is not allowed "
            f"here ({error.strerror}): run as root"
        )
    _enter(inside)
    try:
        yield
    finally:
        _enter(outside)
