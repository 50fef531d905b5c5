"""What the disk tier is measured against: a plain file, a file per chunk, a memory copy.

No tier and no code of one is used here: these are system calls on threads, as few as do the work,
so that what remains between them and the tier is what the tier costs.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from stepwell.bench.payloads import Payloads
from stepwell.bench.storage_results import Section
from stepwell.core.memory import aligned_memory
from stepwell.core.record import PAGE_BYTES, payload_checksum
from stepwell.core.types import Direction

__all__ = [
    "DEPTHS",
    "FILES_AT_ONCE",
    "FilePerChunk",
    "RawFile",
    "Stopwatch",
    "copy_memory",
    "direct_works",
    "hash_memory",
    "run_parallel",
]

DEPTHS = (1, 2, 4, 8, 16)
"""Blocks in flight that are tried for the raw file."""

FILES_AT_ONCE = 16
"""Files in flight: the default threads of vLLM's `fs` tier, for reading and for writing."""

_SPREAD_BYTES = 8 << 20  # what one thread copies at a time, far more than a cache keeps


class Stopwatch:
    """Wall time, the process's CPU time, and the bytes that drives were asked for.

    Starts when it is made.
    """

    def __init__(self) -> None:
        self._wall_s: float | None = None
        self._drive_bytes = _drive_bytes()
        self._cpu_s = time.process_time()
        self._start_s = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s

    def stop(self) -> None:
        """End the wall time; CPU time goes on until `section`."""
        self._wall_s = self.elapsed_s()

    def section(
        self,
        direction: Direction,
        payload_bytes: int,
        latencies_s: Sequence[float] = (),
        first_job_s: float | None = None,
    ) -> Section:
        """What was measured since the start."""
        wall_s = self.elapsed_s() if self._wall_s is None else self._wall_s
        cpu_s = time.process_time() - self._cpu_s
        before, after = self._drive_bytes, _drive_bytes()
        idx = 0 if direction is Direction.READ else 1
        moved = None if before is None or after is None else after[idx] - before[idx]
        return Section(payload_bytes, wall_s, cpu_s, moved, tuple(latencies_s), first_job_s)


def run_parallel(
    direction: Direction,
    num_workers: int,
    num_tasks: int,
    task: Callable[[int], None],
    payload_bytes: int,
) -> Section:
    """Run ``task(0)`` to ``task(num_tasks - 1)`` on threads, in order; blocks.

    The threads are started before the clock is.

    Raises:
        Exception: the first that a task raised; the tasks that had not begun are left out.
    """
    gate, stop = threading.Event(), threading.Event()
    indices = itertools.count()  # one step of it is atomic under the interpreter lock
    errors: list[Exception] = []

    def work() -> None:
        gate.wait()
        while not stop.is_set() and (idx := next(indices)) < num_tasks:
            try:
                task(idx)
            except Exception as error:  # counted: raised again below
                errors.append(error)
                stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_workers)]
    try:
        for thread in threads:
            thread.start()
        watch = Stopwatch()
        gate.set()
        for thread in threads:
            thread.join()
        watch.stop()
    finally:  # on Ctrl-C too, nobody may go on writing
        stop.set()
        gate.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return watch.section(direction, payload_bytes)


class RawFile:
    """A preallocated file per folder, written and read in blocks of one chunk.

    Chunk i lies in file i modulo the number of folders. The first write after opening goes to
    blocks that the file system has allocated and never written; later ones overwrite.

    Args:
        folders: existing ones, one per drive.
        payloads: the buffers.
        direct: open with O_DIRECT.
        num_chunks: the first so many of the buffers; all by default.
    """

    name: ClassVar[str] = "raw"

    def __init__(
        self,
        folders: Sequence[Path],
        payloads: Payloads,
        *,
        direct: bool,
        num_chunks: int | None = None,
    ) -> None:
        self.folders = tuple(folders)
        self.write_depth = self.read_depth = DEPTHS[-1]
        self._payloads = payloads
        self._num_chunks = payloads.num_chunks if num_chunks is None else num_chunks
        self._fds: list[int] = []
        size_bytes = -(-self._num_chunks // len(folders)) * payloads.chunk_bytes
        try:
            for folder in folders:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                path = folder / "raw"
                self._fds.append(os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644))
                os.posix_fallocate(self._fds[-1], 0, size_bytes)
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Nothing: the file stays."""

    def write(self, generation: int) -> Section:
        """Write all chunks, `write_depth` at a time; ``generation`` makes no difference."""
        return self._run(Direction.WRITE, self.write_depth, _write_all)

    def read(self, generation: int) -> Section:
        """Read all chunks, `read_depth` at a time; ``generation`` makes no difference."""
        return self._run(Direction.READ, self.read_depth, _read_all)

    def close(self) -> None:
        """Close the files; they are left where they are."""
        while self._fds:
            os.close(self._fds.pop())

    def _run(
        self, direction: Direction, depth: int, move: Callable[[int, memoryview, int], None]
    ) -> Section:
        chunk_bytes = self._payloads.chunk_bytes

        def task(idx: int) -> None:
            row, drive = divmod(idx, len(self._fds))
            move(self._fds[drive], self._payloads.chunk(idx), row * chunk_bytes)

        payload_bytes = self._num_chunks * chunk_bytes
        return run_parallel(direction, depth, self._num_chunks, task, payload_bytes)


class FilePerChunk:
    """A file per chunk, as vLLM's `fs` tier and LMCache keep them, 16 at once.

    Write: look whether it is there, create a temporary file, write, close, rename. Read: open,
    read, close. Kind to them in three ways: all files lie in one flat folder per drive, nothing
    is kept account of, and former files are removed outside of the timing.

    Args:
        folders: existing ones, one per drive.
        payloads: the buffers.
        direct: open with O_DIRECT.
    """

    name: ClassVar[str] = "file_per_chunk"

    def __init__(self, folders: Sequence[Path], payloads: Payloads, *, direct: bool) -> None:
        self.folders = tuple(folders)
        self._payloads = payloads
        self._flag = os.O_DIRECT if direct else 0

    def prepare(self) -> None:
        """Remove the former files and wait until the file system has done so."""
        for folder in self.folders:
            for path in folder.iterdir():
                path.unlink()
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def write(self, generation: int) -> Section:
        """Write every chunk to a new file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._flag

        def task(idx: int) -> None:
            path = self._path(generation, idx)
            if os.path.exists(path):
                return
            partial = f"{path}.tmp"
            self._open_and(_write_all, partial, flags, idx)
            os.replace(partial, path)

        return self._run(Direction.WRITE, task)

    def read(self, generation: int) -> Section:
        """Read every chunk back from its file."""
        flags = os.O_RDONLY | os.O_CLOEXEC | self._flag

        def task(idx: int) -> None:
            self._open_and(_read_all, self._path(generation, idx), flags, idx)

        return self._run(Direction.READ, task)

    def _path(self, generation: int, idx: int) -> str:
        folder = self.folders[idx % len(self.folders)]
        return os.path.join(folder, f"{generation}-{idx:08x}.bin")

    def _open_and(
        self, move: Callable[[int, memoryview, int], None], path: str, flags: int, idx: int
    ) -> None:
        fd = os.open(path, flags, 0o644)
        try:
            move(fd, self._payloads.chunk(idx), 0)
        finally:
            os.close(fd)

    def _run(self, direction: Direction, task: Callable[[int], None]) -> Section:
        payloads = self._payloads
        return run_parallel(direction, FILES_AT_ONCE, payloads.num_chunks, task, payloads.num_bytes)


def copy_memory(payloads: Payloads, num_threads: int) -> Section:
    """Copy the first half of the buffers over the second; their content is lost."""
    source, target = payloads.halves()
    words = _SPREAD_BYTES // source.itemsize
    num_pieces = -(-len(source) // words)

    def task(idx: int) -> None:
        piece = slice(idx * words, (idx + 1) * words)
        np.copyto(target[piece], source[piece])

    return run_parallel(Direction.WRITE, num_threads, num_pieces, task, source.nbytes)


def hash_memory(payloads: Payloads, num_threads: int) -> Section:
    """Compute the checksum of every chunk, as the tier does after reading it."""

    def task(idx: int) -> None:
        payload_checksum(payloads.chunk(idx))

    return run_parallel(Direction.READ, num_threads, payloads.num_chunks, task, payloads.num_bytes)


def direct_works(folder: Path) -> bool:
    """Whether a page can be written and read with O_DIRECT in ``folder``.

    Some file systems refuse the open, others the first transfer.

    Raises:
        OSError: nothing can be written there at all.
    """
    path = folder / "probe"
    page = aligned_memory(PAGE_BYTES)
    path.touch()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        try:
            return os.pwrite(fd, page, 0) == os.preadv(fd, [page], 0) == PAGE_BYTES
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink()


def _write_all(fd: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        moved = os.pwritev(fd, [buffer[done:]], offset + done)
        if moved == 0:
            raise OSError(f"nothing was written: offset={offset + done}")
        done += moved


def _read_all(fd: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        moved = os.preadv(fd, [buffer[done:]], offset + done)
        if moved == 0:
            raise OSError(f"the file ends too soon: offset={offset + done}")
        done += moved


def _drive_bytes() -> tuple[int, int] | None:
    """Bytes that this process had drives read and write so far; None if the kernel won't say."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])
