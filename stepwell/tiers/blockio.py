"""Reading and writing runs of neighbouring records, past the page cache where possible."""

import errno
import os
import threading
from collections.abc import Sequence

import numpy as np

from stepwell.core.memory import aligned_memory
from stepwell.core.record import HEADER_BYTES, PAGE_BYTES, pad_to_page

__all__ = [
    "MAX_RUN",
    "probe_direct",
    "read_page",
    "read_pages",
    "read_run",
    "write_page",
    "write_run",
]

MAX_RUN = 256
"""Records that one call may move: two buffers each, and the system takes 1024 (IOV_MAX)."""

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


def read_run(fd: int, offset: int, payloads: Sequence[memoryview]) -> list[memoryview | None]:
    """Read neighbouring records, of equal size on storage, in as few calls as possible.

    Args:
        fd: of the file; with O_DIRECT or without.
        offset: of the first record; a multiple of 4096.
        payloads: one writable buffer per record, at most `MAX_RUN`, padded to the same multiple
            of 4096. Their content is undefined unless the records are verified afterwards.

    Returns:
        One header page per record, valid until this thread's next call and not verified; None
        where the file ends before the record does.

    Raises:
        OSError: from the system.
    """
    padded_bytes = pad_to_page(len(payloads[0]))
    pieces = _pieces(payloads, padded_bytes)
    total_bytes = sum(len(piece) for piece in pieces)
    done_bytes = os.preadv(fd, pieces, offset)
    while 0 < done_bytes < total_bytes and done_bytes % PAGE_BYTES == 0:
        # A short read of a whole file is rare but allowed: go on until the end of file.
        more_bytes = os.preadv(fd, _rest(pieces, done_bytes), offset + done_bytes)
        if more_bytes == 0:
            break
        done_bytes += more_bytes
    whole = done_bytes // (HEADER_BYTES + padded_bytes)
    for payload, body in zip(payloads[:whole], pieces[1::2], strict=False):
        if body is not payload:
            source = np.frombuffer(body, np.uint8)[: len(payload)]
            np.copyto(np.frombuffer(payload, np.uint8), source)
    return [pieces[2 * idx] if idx < whole else None for idx in range(len(payloads))]


def write_run(
    fd: int, offset: int, headers: Sequence[bytes], payloads: Sequence[memoryview]
) -> None:
    """Write neighbouring records, of equal size on storage, in as few calls as possible.

    Args:
        fd: of the file; with O_DIRECT or without.
        offset: of the first record; a multiple of 4096.
        headers: 4096 bytes per record.
        payloads: one per record, at most `MAX_RUN`, padded to the same multiple of 4096.

    Raises:
        OSError: from the system; what is there then is undefined.
    """
    padded_bytes = pad_to_page(len(payloads[0]))
    pieces = _pieces(payloads, padded_bytes)
    for idx, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
        pieces[2 * idx][:] = header
        body = pieces[2 * idx + 1]
        if body is not payload:
            target = np.frombuffer(body, np.uint8)
            np.copyto(target[: len(payload)], np.frombuffer(payload, np.uint8))
            target[len(payload) :] = 0
    total_bytes = sum(len(piece) for piece in pieces)
    done_bytes = os.pwritev(fd, pieces, offset)
    while done_bytes < total_bytes:
        more_bytes = os.pwritev(fd, _rest(pieces, done_bytes), offset + done_bytes)
        if more_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done_bytes += more_bytes


def read_page(fd: int, offset: int) -> memoryview:
    """Read one page; shorter at the file's end. Valid until this thread's next call.

    Raises:
        OSError: from the system.
    """
    return read_pages(fd, offset, PAGE_BYTES)


def read_pages(fd: int, offset: int, length: int) -> memoryview:
    """Read whole pages; fewer at the file's end. Valid until this thread's next call.

    Raises:
        OSError: from the system.
    """
    pages = _scratch(length)
    return pages[: os.preadv(fd, [pages], offset)]


def write_page(fd: int, offset: int, content: bytes) -> None:
    """Write one page of 4096 bytes.

    Raises:
        OSError: from the system.
    """
    page = _scratch(PAGE_BYTES)
    page[:] = content
    if os.pwritev(fd, [page], offset) != PAGE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _pieces(payloads: Sequence[memoryview], padded_bytes: int) -> list[memoryview]:
    """Header, body, header, body, ...: a body is the payload itself where that is aligned."""
    straight = [len(payload) == padded_bytes and _is_aligned(payload) for payload in payloads]
    header_bytes = len(payloads) * HEADER_BYTES
    scratch = _scratch(header_bytes + straight.count(False) * padded_bytes)
    pieces, body_at = [], header_bytes
    for idx, payload in enumerate(payloads):
        pieces.append(scratch[idx * HEADER_BYTES : (idx + 1) * HEADER_BYTES])
        if straight[idx]:
            pieces.append(payload)
        else:
            pieces.append(scratch[body_at : body_at + padded_bytes])
            body_at += padded_bytes
    return pieces


def _rest(pieces: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """The pieces without their first ``done_bytes`` bytes."""
    rest = []
    for piece in pieces:
        if done_bytes < len(piece):
            rest.append(piece[done_bytes:])
        done_bytes = max(done_bytes - len(piece), 0)
    return rest


def _scratch(size_bytes: int) -> memoryview:
    # One page-aligned buffer per thread, grown when needed and kept.
    view: memoryview | None = getattr(_local, "view", None)
    if view is None or len(view) < size_bytes:
        view = aligned_memory(size_bytes)
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
