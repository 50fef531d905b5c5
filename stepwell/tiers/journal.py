"""The journal: a hint of where records lie, so that a start need not look at every slot.

A file of `stepwell.tiers.frames`: a snapshot, then what happened since; when that has grown long,
a new file with a new snapshot takes the old one's place. A journal that is lost or damaged is made
again from the records' headers.
"""

import contextlib
import os
import threading
from collections.abc import Callable

from stepwell.tiers.files import opened_folder
from stepwell.tiers.frames import FILE_HEADER, Image

__all__ = ["Journal"]

# Once the entries since the snapshot outnumber these and a quarter of the rows, it is time for a
# new snapshot: replaying them stays a fraction of a start, writing it a fraction of the work.
_TAIL_MIN_ENTRIES = 4096
_TAIL_SHARE = 4


class Journal:
    """Appends frames; makes a new file when the old has grown long.

    Frames are noted while the owner holds its lock, which fixes their order, and written by
    `flush`, which the owner calls without it: a drive that stands still then holds up nobody who
    only asks.

    Args:
        path: of the journal.
        partial: where a new one is made before it takes the old one's place.

    Threading: `note` under the owner's lock, `flush` and `renew` on any thread.
    Errors: none is raised after construction; a journal that cannot be written is given up: it is
        removed, so that the next start reads the headers instead of a hint that is out of date.
        A new one is tried at the next `renew`, and until then frames are dropped.
    """

    def __init__(self, path: str, partial: str) -> None:
        self._path = path
        self._partial = partial
        self._noted: list[bytes] = []
        self._io_lock = threading.Lock()
        self._fd = -1
        self._size_bytes = 0
        self._num_tail = 0
        self.written_bytes = 0
        """To the drive, for its wear."""

    @property
    def broken(self) -> bool:
        """Whether frames are lost: `renew` is needed."""
        return self._fd < 0

    @property
    def noted(self) -> bool:
        """Whether there is something to `flush`."""
        return bool(self._noted)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self._size_bytes

    def resume(self, image: Image) -> bool:
        """Go on with the file that ``image`` was read from; False if it cannot be written."""
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.ftruncate(self._fd, image.valid_bytes)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._give_up()
            return False
        self._size_bytes = image.valid_bytes
        self._num_tail = image.num_tail
        return True

    def long(self, num_rows: int) -> bool:
        """Whether so much followed the snapshot that it is time for a new one."""
        return self._num_tail > max(_TAIL_MIN_ENTRIES, num_rows // _TAIL_SHARE)

    def note(self, frame: bytes, num_entries: int) -> None:
        """Remember a frame for `flush`; the owner's lock is held."""
        self._noted.append(frame)
        self._num_tail += num_entries

    def flush(self, most_bytes: int = 1 << 62) -> bool:
        """Write what was noted so far, in its order; afterwards it is there, or no journal is.

        Args:
            most_bytes: what the file may have.

        Returns:
            False if it would have more, and nothing was written: `renew` it, or give it up.
        """
        with self._io_lock:  # even for nothing: what somebody else took may not be written yet
            noted, count = self._noted, len(self._noted)
            data = b"".join(noted[:count])
            if self._fd >= 0 and self._size_bytes + len(data) > most_bytes:
                return False
            if count:
                del noted[:count]  # others only append
                self._append(data)
            return True

    def _append(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._give_up()
            return
        self._size_bytes += len(data)
        self.written_bytes += len(data)

    def renew(self, lock: threading.Lock, snapshot: Callable[[], bytes]) -> bool:
        """Put a new file with a new snapshot in the old one's place; False if that failed.

        The old one is then gone on with, if there was one; if not, whatever lies there is removed.

        Args:
            lock: the owner's, which is held while the snapshot is taken.
            snapshot: frames of everything that is so now.
        """
        with self._io_lock:  # whoever flushes waits, and then writes to the new file
            with lock:
                head = FILE_HEADER + snapshot()
                noted, num_tail = self._noted, self._num_tail
                self._noted, self._num_tail = [], 0
            try:
                fd = self._write_new(head)
            except OSError:
                with lock:  # the old file must not lack what the snapshot would have had
                    self._noted = noted + self._noted
                    self._num_tail += num_tail
                if self._fd < 0:
                    self._give_up()
                return False
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._size_bytes = len(head)
            self.written_bytes += len(head)
            return True

    def _write_new(self, head: bytes) -> int:
        where, name = os.path.split(self._partial)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with opened_folder(where) as folder:
            fd = os.open(name, flags, 0o644, dir_fd=folder)
            try:
                view = memoryview(head)
                while view:
                    view = view[os.write(fd, view) :]
                os.replace(name, self._path, src_dir_fd=folder)
            except OSError:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise
        return fd

    def give_up(self) -> None:
        """Remove the file, which lacks something; while it is open, only if it lies there still."""
        with self._io_lock:
            self._give_up()

    def in_place(self) -> bool:
        """Whether it lies where the next start looks for it; True as well if there is none."""
        with self._io_lock:
            return self._fd < 0 or self._lies_there()

    def _lies_there(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    def _give_up(self) -> None:
        self._size_bytes = 0
        with contextlib.suppress(OSError):
            if self._fd < 0 or self._lies_there():
                os.unlink(self._path)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Write what was noted and close the file."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is, and drop frames: it may be somebody else's by now."""
        with self._io_lock:
            del self._noted[: len(self._noted)]  # others only append
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
