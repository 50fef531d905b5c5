"""A shared directory: one immutable file per record, fanned out; it empties itself.

NFS, Lustre, an array, 3FS by FUSE: whatever several hosts have mounted at once. The directory is
the index. What may be written is granted by one of those that use it, so that all of them
together keep the capacity (`stepwell.tiers.media.sweep`). Names are in
`stepwell.tiers.media.poolfiles`.
"""

import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from stepwell.core.keys import Key, Root, make_key
from stepwell.core.record import record_bytes
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.settings import format_bytes, parse_duration, parse_size
from stepwell.tiers.errnos import GONE, NO_LINKS
from stepwell.tiers.files import is_there
from stepwell.tiers.media.base import Page, Record, Stats, Wanted
from stepwell.tiers.media.census import prune, record_folders, records
from stepwell.tiers.media.marker import check_user, make_pool, read_pool_id
from stepwell.tiers.media.movers import Mover, SystemCalls, in_time
from stepwell.tiers.media.pool import Pool
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.records import name_of, root_name
from stepwell.tiers.media.sweep import PoolLimits
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, NO_ROOM, write_refusal

__all__ = ["PARAMETERS", "FsMedium", "limits_of", "open_medium", "path_of"]

PARAMETERS = ("capacity", "min_free", "ttl")
"""Of the URL of a directory."""

# What the system says of a file system that is away, rather than of a path that is wrong.
_AWAY = frozenset(
    {
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN,
        errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENODEV, errno.ENXIO,
    }
)  # fmt: skip
# What can be done about it where the system refuses; anything else is said as it is.
_ANOTHER_USER = "all engines that share it run as one user, who can write there"
_IS_FULL = "there is no room on its file system"
_REMEDIES = {
    errno.EACCES: _ANOTHER_USER,
    errno.EPERM: _ANOTHER_USER,
    errno.EROFS: "mount it so that it can be written to",
    errno.ENOSPC: _IS_FULL,
    errno.EDQUOT: _IS_FULL,
    errno.ENOENT: "no pool lies there any more; is its file system mounted?",
    errno.ENOTDIR: "something else is in the place of a directory",
    errno.ELOOP: "something else is in the place of a directory",
}
_NO_SPACE = ChunkResult(Outcome.FULL, Reason.NO_SPACE)
_MAKE_TRIES = 4


def path_of(url: MediumUrl) -> Path:
    """The directory that a URL names.

    Raises:
        ConfigError: it names none.
    """
    if url.host or not url.path.strip("/"):
        raise ConfigError(f"write {url.scheme}:///mnt/pool, with three slashes: url={url.shown}")
    if "\0" in url.path:
        raise ConfigError(f"a path has no zero byte: url={url.shown}")
    return Path(os.path.normpath("/" + url.path.lstrip("/")))


def open_medium(url: MediumUrl, timeout_s: float) -> "FsMedium":
    """The directory that a URL names: ``fs:///mnt/pool``.

    Parameters: ``capacity``, what all engines together may take there (needed), ``min_free``, the
    space that is left whoever uses it up (1GiB), and ``ttl``, after which a record leaves, counted
    from when it was written (none). Engines that differ in them keep those of the one that sweeps.

    Args:
        url: see above.
        timeout_s: how long opening may take; what comes then has no limit of its own, since a
            system call cannot be given up.

    Raises:
        ConfigError: the URL is wrong.
    """
    url.check_parameters(PARAMETERS)
    return FsMedium(path_of(url), limits_of(url), timeout_s)


def limits_of(url: MediumUrl) -> PoolLimits:
    """What a URL says is kept in its directory; see `open_medium`.

    Raises:
        ConfigError: something else, or nothing.
    """
    if "capacity" not in url.parameters:
        raise ConfigError(
            f"what the engines together may take is needed: "
            f"{url.scheme}://{url.path}?capacity=10TiB"
        )
    ttl = url.parameters.get("ttl")
    return PoolLimits(
        parse_size(url.parameters["capacity"], "capacity"),
        parse_size(url.parameters.get("min_free", "1GiB"), "min_free"),
        parse_duration(ttl, "ttl", most_s=365 * 86400.0) if ttl else 0.0,
    )


class _Opening(threading.Thread):
    """Looks at the directory, however long that takes."""

    def __init__(self, medium: "FsMedium", *, make: bool) -> None:
        super().__init__(name="stepwell-pool-open", daemon=True)
        self.error: Exception | None = None
        self._medium = medium
        self._make = make

    def run(self) -> None:
        """See above."""
        try:
            self._medium.prepare(make=self._make)
        except Exception as error:  # counted by whoever waits: it is raised there
            self.error = error


class FsMedium:
    """Records as files. See `stepwell.tiers.media.base.Medium`.

    A system call on a file system that hangs does not come back in time; `within_s` is looked at
    between records. Whoever waits for a medium has deadlines of its own.

    Args:
        path: absolute; its parent must exist.
        limits: of all that use it together.
        timeout_s: how long opening may take.
        mover: of the records' bytes; its own from now on. By system calls if None.
    """

    def __init__(
        self,
        path: Path,
        limits: PoolLimits,
        timeout_s: float = 10.0,
        mover: Mover | None = None,
    ) -> None:
        self.path = path
        self._limits = limits
        self._timeout_s = timeout_s
        self._files = PoolFiles(path)
        self._numbers = itertools.count()
        self._mover: Mover = SystemCalls() if mover is None else mover
        self._lock = threading.Lock()
        self._opening: _Opening | None = None
        self._pool: Pool | None = None
        self._closed = False

    def check(self) -> None:
        """See `stepwell.tiers.media.base.Medium.check`. Makes the pool if there is none."""
        self._open(make=True, within_s=self._timeout_s)

    def _open(self, *, make: bool, within_s: float) -> Pool:
        with self._lock:
            opening = self._opening
            if self._pool is None and (opening is None or not opening.is_alive()):
                opening = _Opening(self, make=make)
                try:
                    opening.start()
                except RuntimeError as error:
                    raise TierError(f"there is no thread for it: path={self.path}") from error
                self._opening = opening
        if self._pool is None and opening is not None:
            opening.join(min(within_s, self._timeout_s))
            if opening.error is not None:
                raise self._why_not(opening.error) from opening.error
        if self._pool is None:
            raise TierError(f"the directory does not answer: path={self.path}")
        return self._pool

    def _why_not(self, error: Exception) -> Exception:
        if isinstance(error, RuntimeError):  # no thread for the pool
            return TierError(f"the directory is not opened: path={self.path} error={error}")
        if not isinstance(error, OSError):
            return error
        what = error.strerror or str(error)
        if error.errno in _AWAY:
            return TierError(f"the directory fails: path={self.path} error={what}")
        remedy = _REMEDIES.get(error.errno or 0)
        return ConfigError(
            f"the directory cannot be used ({what}){f'; {remedy}' if remedy else ''}: "
            f"path={error.filename or self.path}"
        )

    def prepare(self, *, make: bool) -> None:
        """Join the pool; blocks for as long as the file system does.

        Args:
            make: the pool, if there is none. Only at the start: a pool that was there and is not
                has lost its file system, and what would be made lies on another.

        Raises:
            ConfigError: it is no pool, or none of this version. OSError: from the system.
        """
        if make:
            make_pool(self.path, self._limits.capacity_bytes)
            status = os.statvfs(self.path)
            if 0 < status.f_blocks * status.f_frsize <= self._limits.min_free_bytes:
                raise ConfigError(
                    f"min_free is all that the file system has: path={self.path} "
                    f"min_free={format_bytes(self._limits.min_free_bytes)} "
                    f"file_system={format_bytes(status.f_blocks * status.f_frsize)}"
                )
        read_pool_id(self.path)
        check_user(self.path, self._files.temp)
        self._files.make_folders()
        self._mover.check(self._files.temp)
        pool = Pool(self._files, self._limits)
        with self._lock:
            closed = self._closed
            if not closed:
                self._pool = pool
        if closed:
            pool.close()

    def exist(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `stepwell.tiers.media.base.Medium.exist`."""
        return [self._exists(path) for path in in_time(map(self._path, keys), self.path, within_s)]

    def _exists(self, path: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except OSError as error:
            if error.errno in GONE:
                return False
            raise self._failure("stat", error) from error

    def read(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.read`."""
        give_up_s = time.monotonic() + within_s
        if self._opening is not None:
            # An engine's: until it is a member, what may hang has a thread of its own. A tool
            # has not begun to join, and is not to.
            self._ready(within_s)
        paths = [self._path(each.key) for each in wanted]
        return self._mover.read(
            paths, [each.payload for each in wanted], give_up_s - time.monotonic()
        )

    def write(self, records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.write`."""
        give_up_s = time.monotonic() + within_s
        pool = self._ready(within_s)
        results = [NO_ROOM] * len(records)
        reserved: dict[int, int] = {}  # index -> bytes
        charged: set[int] = set()
        try:
            for idx, record in enumerate(in_time(records, self.path, within_s)):
                size_bytes = record_bytes(len(record.payload))
                # Behind one that was refused nobody waits: what has room is to be written yet.
                left_s = give_up_s - time.monotonic() if len(reserved) == idx else 0.0
                if pool.reserve(size_bytes, left_s):
                    reserved[idx] = size_bytes
                elif pool.trouble and not pool.is_too_large(size_bytes):
                    raise TierError(f"the pool fails: path={self.path} error={pool.trouble}")
            if reserved:
                self._write(records, list(reserved), results, charged, give_up_s)
        finally:
            for idx, size_bytes in reserved.items():
                refused = results[idx] == _NO_SPACE
                pool.settle(size_bytes, written=idx in charged, refused=refused)
        return results

    def _write(
        self,
        records: Sequence[Record],
        idxs: Sequence[int],
        results: list[ChunkResult],
        charged: set[int],
        give_up_s: float,
    ) -> None:
        """Write some of the records, and put what became of each in its place.

        Args:
            records: all.
            idxs: of those to be written.
            results: of all; changed.
            charged: indexes of those that are there now, or may be; added to.
            give_up_s: when, by the monotonic clock.
        """
        before = f"{self._files.temp}/{self._ready(0.0).member_id}"
        temps = [f"{before}-{next(self._numbers)}" for _ in idxs]
        some = [records[idx] for idx in idxs]
        try:
            written = self._mover.write(temps, some, give_up_s - time.monotonic())
            for idx, temp, result in zip(idxs, temps, written, strict=True):
                results[idx] = result
                if result == DONE:
                    charged.add(idx)  # whatever happens in between
                    results[idx], may_be_there = self._publish(temp, self._path(records[idx].key))
                    if not may_be_there:
                        charged.remove(idx)
        except TierError:
            temps = []  # the mover removes them, and waits for nobody
            raise
        finally:
            for temp in temps:
                with contextlib.suppress(OSError):
                    os.unlink(temp)

    def _publish(self, temp: str, path: str) -> tuple[ChunkResult, bool]:
        """Give a whole record its name, unless there is one of that name.

        Returns:
            What became of it; and whether it may be there now, of this call's making. An answer
            that was lost, as by a server that is slow, says nothing of what was done.
        """
        try:
            for _ in range(_MAKE_TRIES):  # a folder that was empty for long may vanish again
                if self._make_folder(path):
                    try:
                        return self._named(temp, path)
                    except FileNotFoundError:
                        continue
        except OSError as error:
            return write_refusal(error), False
        return write_refusal(FileNotFoundError(errno.ENOENT, "", path)), False

    def _named(self, temp: str, path: str) -> tuple[ChunkResult, bool]:
        """See `_publish`.

        Raises:
            FileNotFoundError: the record's folder has vanished.
        """
        try:
            try:
                os.link(temp, path)
            except FileExistsError:
                # Said as well by an NFS server that is asked a second time, after it was done.
                is_ours = os.lstat(temp).st_nlink > 1
                return (DONE, True) if is_ours else (ALREADY_THERE, False)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                # Of two at once the second wins, and both are right.
                if is_there(path):
                    return ALREADY_THERE, False
                try:
                    os.rename(temp, path)
                except FileNotFoundError as error:
                    if is_there(temp):
                        raise
                    return write_refusal(error), True  # it may have been done at the first asking
        except FileNotFoundError:
            raise
        except OSError as error:
            result = write_refusal(error)
            return result, result != _NO_SPACE
        return DONE, True

    def _make_folder(self, path: str) -> bool:
        """Make a record's folder where it is missing; but not `chunks`, which is the pool's.

        Raises:
            NotADirectoryError: something else lies in the way, a link included.
        """
        if self._files.is_inside(path):
            return True
        folder = self._files.chunks
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        for name in os.path.dirname(path)[len(folder) + 1 :].split("/"):
            folder = f"{folder}/{name}"
            try:
                os.mkdir(folder)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(folder).st_mode):
                    raise NotADirectoryError(
                        errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder
                    ) from None
            except FileNotFoundError:
                if not is_there(self._files.chunks):
                    raise
                return False
        return True

    def remove(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.remove`."""
        for path in in_time(map(self._path, keys), self.path, within_s):
            try:
                if self._files.is_inside(path):
                    os.unlink(path)
            except OSError as error:
                # A directory of a record's name is nobody's record.
                if error.errno not in GONE and error.errno != errno.EISDIR:
                    raise self._failure("unlink", error) from error

    def touch(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.touch`: by the file system's clock.

        A record of another user's is left as it is: its order of use is that of writing.
        """
        now_ns = self._ready(within_s).now_ns()
        for path in in_time(map(self._path, keys), self.path, within_s):
            try:
                written_ns = os.lstat(path).st_mtime_ns
                os.utime(path, ns=(now_ns, written_ns), follow_symlinks=False)
            except OSError as error:
                if error.errno not in GONE and error.errno not in (errno.EPERM, errno.EACCES):
                    raise self._failure("utime", error) from error

    def erase(self, root: Root) -> int:
        """See `stepwell.tiers.media.base.Medium.erase`.

        What is written meanwhile may stay.
        """
        count = 0
        try:
            for folder in record_folders(f"{self._files.chunks}/{root_name(root)}"):
                for seen in records(folder):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(seen.path)
                        count += 1
                prune(folder, 1 << 63)  # unless somebody writes to it; the root's with the last
        except OSError as error:
            raise self._failure("erase", error) from error
        if count:
            with contextlib.suppress(OSError):  # it is counted some time anyway
                self._files.ask_for_count()
        return count

    def keys(self, root: Root) -> Iterator[Key]:
        """See `stepwell.tiers.media.base.Medium.keys`."""
        try:
            for folder in record_folders(f"{self._files.chunks}/{root_name(root)}"):
                for seen in records(folder):
                    yield make_key(root, bytes.fromhex(os.path.basename(seen.path)))
        except OSError as error:
            raise self._failure("list", error) from error

    def stats(self, within_s: float) -> Stats:
        """See `stepwell.tiers.media.base.Medium.stats`: as the one that sweeps knows it."""
        pool = self._ready(within_s)
        return Stats(None, pool.used_bytes(), self._limits.capacity_bytes)

    def close(self) -> None:
        """See `stepwell.tiers.media.base.Medium.close`."""
        with self._lock:
            self._closed = True
            pool = self._pool
        if pool is not None:
            pool.close()
        self._mover.close()

    def _ready(self, within_s: float) -> Pool:
        if self._pool is not None:
            return self._pool
        try:
            return self._open(make=False, within_s=within_s)
        except ConfigError as error:  # nobody is there any more who could set it right
            raise TierError(str(error)) from error

    def _path(self, key: Key) -> str:
        root, name = name_of(key)
        spread = xxhash.xxh3_64_intdigest(key) & 0xFFFF
        return f"{self._files.chunks}/{root}/{spread >> 8:02x}/{spread & 0xFF:02x}/{name}"

    def _failure(self, call: str, error: OSError) -> TierError:
        return TierError(f"{call} failed: path={self.path} error={error.strerror or error}")
