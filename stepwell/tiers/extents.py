"""The extents of one drive as files: made, opened, read, written, dropped, looked through."""

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from stepwell.core.record import HEADER_BYTES, Header
from stepwell.errors import DataError
from stepwell.tiers import blockio
from stepwell.tiers.directory import FoundExtent, StoreDirectory
from stepwell.tiers.files import open_in_folder, opened_folder
from stepwell.tiers.slots import Extent, place_of, slot_of

__all__ = ["ExtentFiles"]

_SCAN_THREADS = 8
_SCAN_SLOTS = 4096  # per piece of work
_SCAN_BYTES = 1 << 20  # read at once
_ZEROS = bytes(HEADER_BYTES)


class ExtentFiles:
    """Open files of extents.

    A file is removed or replaced by name only if it is the one that is open: what lies under a
    name may have become somebody else's, and the directory a link.

    Args:
        directory: opened.
        direct: open with O_DIRECT.

    Threading: any thread; an extent is dropped only when nobody reads or writes it.
    """

    def __init__(self, directory: StoreDirectory, *, direct: bool) -> None:
        self._directory = directory
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        self._fds: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._wear_lock = threading.Lock()
        self.written_bytes = 0
        """To the drive, for its wear."""

    def adopt(self, found: FoundExtent) -> int:
        """Open an extent that lies there; returns its whole slots.

        What lies behind the last whole slot is cut off. A file without any is moved to the strays,
        since nobody would count it.

        Raises:
            OSError: from the system.
        """
        num_slots = found.size_bytes // found.slot_bytes
        if not num_slots:
            self._directory.set_aside(found.path)
            return 0
        fd = open_in_folder(found.path, self._flags)
        self._fds[found.extent_id] = fd
        self._names[found.extent_id] = os.path.basename(found.path)
        if found.size_bytes % found.slot_bytes:
            os.ftruncate(fd, num_slots * found.slot_bytes)
        return num_slots

    def make(self, extent: Extent) -> None:
        """Make a planned extent: a file with all of its space allocated.

        Raises:
            OSError: from the system; nothing is left.
        """
        self._directory.make_folders()
        name = os.path.basename(self._directory.extent_path(extent.extent_id, extent.slot_bytes))
        partial = secrets.token_hex(16)
        with (
            opened_folder(self._directory.partial) as begun,
            opened_folder(self._directory.extents) as extents,
        ):
            try:
                # Where the file system cannot preallocate, the C library writes a byte to every
                # block, which O_DIRECT would not take.
                flags = (self._flags & ~os.O_DIRECT) | os.O_CREAT | os.O_EXCL
                fd = os.open(partial, flags, 0o644, dir_fd=begun)
                try:
                    os.posix_fallocate(fd, 0, extent.num_slots * extent.slot_bytes)
                finally:
                    os.close(fd)
                fd = os.open(partial, self._flags, dir_fd=begun)
                try:
                    _refuse_taken(name, extents)
                    os.rename(partial, name, src_dir_fd=begun, dst_dir_fd=extents)
                except OSError:
                    os.close(fd)
                    raise
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=begun)
                raise
        self._fds[extent.extent_id] = fd
        self._names[extent.extent_id] = name

    def drop(self, extent: Extent) -> bool:
        """Remove an extent's file; False if it cannot be removed, and then it stays open.

        Another file that has its name by now is moved to the strays, or nobody would count it.
        """
        extent_id = extent.extent_id
        try:
            with opened_folder(self._directory.extents) as folder:
                name = self._names[extent_id]
                if self._lies_in(folder, extent_id):
                    os.unlink(name, dir_fd=folder)
                elif name in os.listdir(folder):
                    self._directory.set_aside(os.path.join(self._directory.extents, name))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return False
        self._names.pop(extent_id)
        os.close(self._fds.pop(extent_id))
        return True

    def _lies_in(self, folder: int, extent_id: int) -> bool:
        """Whether the file that is open is the one that has its name."""
        name, fd = self._names[extent_id], self._fds[extent_id]
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    @property
    def extent_ids(self) -> set[int]:
        """Those that are open."""
        return set(self._fds)

    def lost(self) -> set[int]:
        """Extents whose files somebody has removed or replaced: what is written there is gone at
        the end.
        """
        try:
            with opened_folder(self._directory.extents) as folder:
                lost = set()
                for extent_id in tuple(self._fds):
                    with contextlib.suppress(OSError, KeyError):  # it is being dropped just now
                        if not self._lies_in(folder, extent_id):
                            lost.add(extent_id)
                return lost
        except (FileNotFoundError, NotADirectoryError):
            return set(self._fds)
        except OSError:
            return set()  # nobody can tell

    def reopen(self, extent_ids: Collection[int]) -> set[int]:
        """Open anew those that were replaced by a file of equal length, a copy say; returns others.

        Whether the right records lie there is seen when they are read.
        """
        left = set(extent_ids)
        for extent_id in extent_ids:
            with contextlib.suppress(OSError, KeyError):
                path = os.path.join(self._directory.extents, self._names[extent_id])
                fd = open_in_folder(path, self._flags)
                try:
                    if os.fstat(fd).st_size == os.fstat(self._fds[extent_id]).st_size:
                        os.dup2(fd, self._fds[extent_id], inheritable=False)
                        left.discard(extent_id)
                finally:
                    os.close(fd)
        return left

    def shorten(self, extent: Extent) -> bool:
        """Cut an extent's file to the slots that it has left; False if that cannot be done."""
        try:
            os.ftruncate(self._fds[extent.extent_id], extent.num_slots * extent.slot_bytes)
        except OSError:
            return False
        return True

    def read(
        self, place: int, slot_bytes: int, payloads: Sequence[memoryview]
    ) -> list[memoryview | None]:
        """Read neighbouring records from ``place`` on; see `stepwell.tiers.blockio.read_run`."""
        extent_id, slot_idx = slot_of(place)
        return blockio.read_run(self._fds[extent_id], slot_idx * slot_bytes, payloads)

    def write(
        self, place: int, slot_bytes: int, headers: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> None:
        """Write neighbouring records from ``place`` on; see `stepwell.tiers.blockio.write_run`."""
        extent_id, slot_idx = slot_of(place)
        blockio.write_run(self._fds[extent_id], slot_idx * slot_bytes, headers, payloads)
        self._wrote(slot_bytes * len(payloads))

    def wipe(self, place: int, slot_bytes: int) -> None:
        """Make sure that a record is never found again, whatever becomes of the journal.

        Raises:
            OSError: from the system.
        """
        extent_id, slot_idx = slot_of(place)
        blockio.write_page(self._fds[extent_id], slot_idx * slot_bytes, _ZEROS)
        self._wrote(HEADER_BYTES)

    def free_bytes(self) -> int:
        """Free space on the drive for this process.

        Raises:
            OSError: from the system.
        """
        status = os.statvfs(self._directory.path)
        return status.f_bavail * status.f_frsize

    def drive_bytes(self) -> int:
        """Size of the file system, which stands for the drive's; at least 1.

        Raises:
            OSError: from the system.
        """
        status = os.statvfs(self._directory.path)
        return max(1, status.f_blocks * status.f_frsize)

    def headers(self, extents: Sequence[Extent]) -> Iterator[tuple[int, Header]]:
        """Every readable header as (place, header): the truth, at one small read per slot."""
        pieces = [
            (extent, begin)
            for extent in extents
            for begin in range(0, extent.num_slots, _SCAN_SLOTS)
        ]
        with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="stepwell-scan") as pool:
            for found in pool.map(self._scan_piece, pieces):
                yield from found

    def _scan_piece(self, piece: tuple[Extent, int]) -> list[tuple[int, Header]]:
        extent, begin = piece
        slot_bytes = extent.slot_bytes
        end = min(begin + _SCAN_SLOTS, extent.num_slots)
        # Small slots are read whole, many at once, rather than their headers one by one.
        step = max(1, _SCAN_BYTES // slot_bytes)
        found: list[tuple[int, Header]] = []
        for first in range(begin, end, step):
            found += self._scan_slots(extent, first, min(step, end - first))
        return found

    def _scan_slots(self, extent: Extent, first: int, count: int) -> list[tuple[int, Header]]:
        fd, slot_bytes = self._fds[extent.extent_id], extent.slot_bytes
        length = (count - 1) * slot_bytes + HEADER_BYTES
        try:
            pages = blockio.read_pages(fd, first * slot_bytes, length)
        except OSError:
            if count == 1:
                return []  # not readable: nothing that could be served
            singly = [self._scan_slots(extent, first + idx, 1) for idx in range(count)]
            return [each for one in singly for each in one]
        found = []
        for idx in range(count):
            page = pages[idx * slot_bytes : idx * slot_bytes + HEADER_BYTES]
            with contextlib.suppress(DataError):  # never written, or torn
                found.append((place_of(extent.extent_id, first + idx), Header.unpack(page)))
        return found

    def _wrote(self, num_bytes: int) -> None:
        with self._wear_lock:
            self.written_bytes += num_bytes

    def close(self) -> None:
        """Close every file."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._names.clear()


def _refuse_taken(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def out_of_space(error: OSError) -> bool:
    """Whether an error means that the drive is full, rather than broken."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
