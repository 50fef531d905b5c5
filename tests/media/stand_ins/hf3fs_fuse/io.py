"""USRBIO as its users see it, done by pread and pwrite, and able to fail in every way.

Names and arguments are those of `hf3fs_fuse.io` of 3FS. What that one demands of its users and
does not check is checked here: a descriptor is registered once, and given up before it is closed;
a ring is used by one thread at a time; a buffer lies in the iovec.
"""

import contextlib
import errno
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any


@dataclass
class Faults:
    """What goes wrong from now on.

    Attributes:
        result: changes the result of an operation: given its number since the beginning and the
            result that it has; None for a result that does not come.
        prepare, submit, wait: errnos that these raise, one after the other.
        shuffled: results come in any order.
        released: what has no result is done after all, and its result comes, when this is set.
    """

    result: Callable[[int, int], int | None] = lambda number, count: count
    prepare: list[int] = field(default_factory=list)
    submit: list[int] = field(default_factory=list)
    wait: list[int] = field(default_factory=list)
    fsync: list[int] = field(default_factory=list)
    shuffled: bool = True
    released: threading.Event = field(default_factory=threading.Event)


faults = Faults()
registered: set[int] = set()
complaints: list[str] = []
num_operations = 0
num_rings = 0
_lock = threading.Lock()
_random = random.Random(5)


def reset() -> None:
    """Nothing goes wrong any more."""
    global faults, num_operations, num_rings
    faults.released.set()
    faults = Faults()
    num_operations = num_rings = 0
    complaints.clear()


def register_fd(fd: int, flags: int = 0) -> None:
    if fd in registered:
        complaints.append("registered twice")
        raise OSError(errno.EINVAL, "registered twice")
    registered.add(fd)


def deregister_fd(fd: int) -> None:
    try:
        os.fstat(fd)
    except OSError:
        complaints.append("closed before it was given up")
    if fd not in registered:
        complaints.append("given up and was not registered")
    registered.discard(fd)


def force_fsync(fd: int) -> int:
    if faults.fsync:
        return -faults.fsync.pop(0)
    os.fsync(fd)
    return 0


def extract_mount_point(path: str) -> str | None:
    while not os.path.isdir(os.path.join(path, "3fs-virt")):
        path, former = os.path.dirname(path), path
        if path == former:
            return None
    return path


class Slice:
    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.result = 0
        self.userdata: Any = None


class iovec:
    def __init__(self, memory: memoryview, link: str) -> None:
        self._memory = memory
        self._link = link

    def __getitem__(self, part: slice) -> Slice:
        found = self._memory[part]
        assert len(found) == part.stop - part.start, "beyond the iovec"
        return Slice(found)

    def __del__(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the tests' directory may be gone
            os.unlink(self._link)


def make_iovec(shm: SharedMemory, mount: str, block_size: int = 0, numa: int = -1) -> iovec:
    assert os.path.exists(f"/dev/shm/{shm.name}"), "3FS opens it by its name"
    link = f"{mount}/3fs-virt/iovs/{uuid.uuid4()}"
    os.symlink(f"/dev/shm/{shm.name}", link)
    return iovec(shm.buf, link)


@dataclass
class _Operation:
    part: Slice
    read: bool
    fd: int
    offset: int
    number: int


class ioring:
    def __init__(self, entries: int, for_read: bool) -> None:
        self._entries = entries
        self._for_read = for_read
        self._prepared: list[_Operation] = []
        self._stuck: list[_Operation] = []
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            complaints.append("two threads use a ring")
            raise OSError(errno.EBUSY, "two threads use a ring")
        try:
            yield
        finally:
            self._busy.release()

    def prepare(self, part: Slice, read: bool, fd: int, off: int, userdata: Any = None) -> "ioring":
        global num_operations
        with self._alone():
            if faults.prepare and (number := faults.prepare.pop(0)):
                raise OSError(number, os.strerror(number))
            if read is not self._for_read or fd not in registered:
                complaints.append("a wrong ring, or a descriptor that is not registered")
                raise OSError(errno.EINVAL, "wrong")
            if len(self._prepared) + len(self._stuck) == self._entries:
                raise OSError(errno.EAGAIN, "the ring is full")
            part.userdata = userdata
            with _lock:
                number, num_operations = num_operations, num_operations + 1
            self._prepared.append(_Operation(part, read, fd, off, number))
            return self

    def submit(self) -> "ioring":
        with self._alone():
            if faults.submit and (number := faults.submit.pop(0)):
                raise OSError(number, os.strerror(number))
            return self

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None
    ) -> list[Slice]:
        with self._alone():
            if faults.wait and (number := faults.wait.pop(0)):
                raise OSError(number, os.strerror(number))
            give_up_s = time.monotonic() + (timeout.total_seconds() if timeout else 1e9)
            results: list[Slice] = []
            while True:
                results += self._finished(max(max_results, min_results) - len(results))
                if len(results) >= min_results or time.monotonic() > give_up_s:
                    return results
                time.sleep(0.002)

    def _finished(self, most: int) -> list[Slice]:
        if faults.shuffled:
            _random.shuffle(self._prepared)
        if faults.released.is_set():
            self._prepared, self._stuck = self._prepared + self._stuck, []
        results = []
        while self._prepared and len(results) < most:
            operation = self._prepared.pop(0)
            wanted = faults.result(operation.number, len(operation.part.memory))
            if wanted is None and not faults.released.is_set():
                self._stuck.append(operation)
                continue
            results.append(self._done(operation, wanted))
        return results

    def _done(self, operation: _Operation, wanted: int | None) -> Slice:
        part = operation.part
        memory = part.memory if wanted is None else part.memory[: max(0, wanted)]
        if wanted is not None and wanted < 0:
            part.result = wanted
        elif operation.read:
            part.result = os.preadv(operation.fd, [memory], operation.offset)
        else:
            part.result = os.pwrite(operation.fd, memory, operation.offset)
        return part


def make_ioring(
    mount: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> ioring:
    global num_rings
    num_rings += 1
    return ioring(entries, for_read)
