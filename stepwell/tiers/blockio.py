"""Reading and writing one record: aligned, past the page cache where the file system lets us."""

import errno
import mmap
import os
import threading

import numpy as np

from stepwell.core.record import HEADER_BYTES, PAGE_BYTES, pad_to_page
from stepwell.core.types import Reason
from stepwell.errors import DataError

__all__ = ["probe_direct", "read_record", "write_record"]

_local = threading.local()


def probe_direct(directory: str) -> bool:
    """Whether O_DIRECT works in ``directory``: one page is written and read back.

    On a full disk the open alone decides.

    Raises:
        OSError: nothing can be written there at all.
    """
    path = os.path.join(directory, f"probe-{os.getpid()}-{threading.get_ident()}")
    page = _scratch(PAGE_BYTES)
    for flag in (os.O_DIRECT, 0):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flag, 0o644)
            try:
                os.unlink(path)
                if os.pwrite(fd, page, 0) != PAGE_BYTES or os.preadv(fd, [page], 0) != PAGE_BYTES:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            finally:
                os.close(fd)
        except OSError as error:
            if flag and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                continue
            _unlink_quietly(path)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return bool(flag)
            raise
        else:
            return bool(flag)
    return False


def read_record(path: str, payload: memoryview, *, direct: bool) -> memoryview:
    """Read a record's payload into ``payload`` and return its header page.

    Args:
        path: of the record.
        payload: writable, as long as the payload should be. Its content is undefined unless the
            record is verified afterwards.
        direct: open with O_DIRECT.

    Returns:
        4096 bytes that are valid until this thread's next call. Not verified.

    Raises:
        DataError: TRUNCATED.
        OSError: from the system.
    """
    padded_bytes = pad_to_page(len(payload))
    straight = len(payload) == padded_bytes and _is_aligned(payload)
    page = _scratch(HEADER_BYTES + (0 if straight else padded_bytes))
    body = payload if straight else page[HEADER_BYTES:]
    # O_NOFOLLOW and O_NONBLOCK: a link or a pipe in a record's place must neither be followed
    # nor waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0))
    try:
        read_bytes = os.preadv(fd, [page[:HEADER_BYTES], body], 0)
        if 0 < read_bytes < HEADER_BYTES + padded_bytes:
            # A short read of a whole file is rare but allowed: go on until the end of file.
            read_bytes = _read_rest(fd, page[:HEADER_BYTES], body, read_bytes)
    finally:
        os.close(fd)
    if read_bytes < HEADER_BYTES:
        raise DataError(f"cut short: bytes={read_bytes}", Reason.TRUNCATED)
    if read_bytes < HEADER_BYTES + padded_bytes:
        raise DataError(
            f"cut short: bytes={read_bytes} expected={HEADER_BYTES + padded_bytes}",
            Reason.TRUNCATED,
        )
    if not straight:
        np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(body, np.uint8)[: len(payload)])
    return page[:HEADER_BYTES]


def write_record(path: str, header: bytes, payload: memoryview, *, direct: bool) -> None:
    """Write a new file that holds one record; on failure no file is left.

    Raises:
        OSError: from the system.
    """
    padded_bytes = pad_to_page(len(payload))
    straight = len(payload) == padded_bytes and _is_aligned(payload)
    page = _scratch(HEADER_BYTES + (0 if straight else padded_bytes))
    page[:HEADER_BYTES] = header
    body = payload
    if not straight:
        body = page[HEADER_BYTES:]
        target = np.frombuffer(body, np.uint8)
        np.copyto(target[: len(payload)], np.frombuffer(payload, np.uint8))
        target[len(payload) :] = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
    try:
        try:
            written = os.pwritev(fd, [page[:HEADER_BYTES], body], 0)
            while written < HEADER_BYTES + padded_bytes:
                written += _write_rest(fd, page[:HEADER_BYTES], body, written)
        finally:
            os.close(fd)
    except OSError:
        _unlink_quietly(path)
        raise


def _rest(header: memoryview, body: memoryview, offset: int) -> list[memoryview]:
    if offset < HEADER_BYTES:
        return [header[offset:], body]
    return [body[offset - HEADER_BYTES :]]


def _read_rest(fd: int, header: memoryview, body: memoryview, offset: int) -> int:
    while offset < HEADER_BYTES + len(body):
        if offset % PAGE_BYTES:
            return offset  # not at a page's end: that is the end of the file
        more = os.preadv(fd, _rest(header, body, offset), offset)
        if more == 0:
            return offset
        offset += more
    return offset


def _write_rest(fd: int, header: memoryview, body: memoryview, offset: int) -> int:
    written = os.pwritev(fd, _rest(header, body, offset), offset)
    if written == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return written


def _scratch(size_bytes: int) -> memoryview:
    # One page-aligned buffer per thread, grown when needed and kept: mmap returns whole pages.
    view: memoryview | None = getattr(_local, "view", None)
    if view is None or len(view) < size_bytes:
        view = memoryview(mmap.mmap(-1, size_bytes))
        _local.view = view
    return view[:size_bytes]


def _is_aligned(buffer: memoryview) -> bool:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
