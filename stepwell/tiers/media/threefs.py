"""3FS: a shared directory there, its bytes by USRBIO where its library is, else by FUSE."""

import contextlib
import errno
import importlib
import importlib.util
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from stepwell.core.types import ChunkResult
from stepwell.errors import ConfigError, TierError
from stepwell.tiers.media.base import Page, Record
from stepwell.tiers.media.fs import PARAMETERS, FsMedium, limits_of, path_of
from stepwell.tiers.media.movers import Mover, Piece, SystemCalls, TransferMover
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["open_medium"]

logger = logging.getLogger(__name__)

_LIBRARY = "hf3fs_fuse"
_APIS = ("usrbio", "posix")
_ENTRIES = 256
_PATIENCE = timedelta(seconds=1)
_AGAIN_S = 0.1
_TELL_EVERY_S = 60.0
_MAX_KEPT = 16
_SHARED = "/dev/shm"


def open_medium(url: MediumUrl, timeout_s: float) -> FsMedium:
    """The directory that a URL names: ``3fs:///3fs/stage/pool``.

    Parameters: those of `stepwell.tiers.media.fs`, and ``api``: ``usrbio`` to refuse where
    that does not go, ``posix`` to go through FUSE even where it does. Without it, USRBIO is taken
    if `hf3fs_fuse.io` can be imported and the directory lies on 3FS.

    Args:
        url: see above.
        timeout_s: how long opening may take.

    Raises:
        ConfigError: the URL is wrong, or the library is missing.
    """
    url.check_parameters((*PARAMETERS, "api"))
    api = url.parameters.get("api", "")
    if api and api not in _APIS:
        raise ConfigError(f"api is one of {','.join(_APIS)}: url={url.shown} api={api!r}")
    if api == "usrbio" and importlib.util.find_spec(_LIBRARY) is None:
        raise ConfigError(f"api=usrbio needs {_LIBRARY}, which comes with 3FS: url={url.shown}")
    return FsMedium(path_of(url), limits_of(url), timeout_s, _ThreeFsMover(api))


class _ThreeFsMover:
    """One of the two ways, chosen when it is first tried; USRBIO then for good.

    A way that was chosen anew at every trial would leave behind what of the former is late.
    """

    def __init__(self, api: str) -> None:
        self._api = api
        self._mover: Mover | None = None
        self._kept: list[_Rings] = []

    def check(self, folder: str) -> None:
        """See `stepwell.tiers.media.movers.Mover.check`."""
        if not isinstance(self._mover, TransferMover):
            self._mover = self._chosen(folder)
        self._mover.check(folder)

    def _chosen(self, folder: str) -> Mover:
        library = self._library()
        if library is None:
            logger.warning("3FS through FUSE: path=%s", folder)
            return SystemCalls()
        mount = library.extract_mount_point(folder)
        if mount is None:
            if self._api == "usrbio":
                raise ConfigError(f"this is no directory of 3FS: path={folder}")
            logger.warning("no directory of 3FS; by system calls: path=%s", folder)
            return SystemCalls()
        logger.info("3FS through USRBIO: path=%s mount=%s", folder, mount)
        kept = self._kept
        return TransferMover(
            "usrbio", lambda size: _Rings(library, mount, size, kept), direct=False
        )

    def _library(self) -> Any | None:
        if self._api == "posix" or importlib.util.find_spec(_LIBRARY) is None:
            return None
        try:
            return importlib.import_module(f"{_LIBRARY}.io")
        except ImportError as error:
            if self._api == "usrbio":
                raise ConfigError(f"{_LIBRARY}.io does not load: error={error}") from error
            logger.warning("%s.io does not load: error=%s", _LIBRARY, error)
            return None

    def read(
        self, paths: Sequence[str], payloads: Sequence[memoryview], within_s: float
    ) -> list[Page | ChunkResult]:
        """See `stepwell.tiers.media.movers.Mover.read`."""
        return self._ready(paths).read(paths, payloads, within_s) if paths else []

    def write(
        self, paths: Sequence[str], records: Sequence[Record], within_s: float
    ) -> list[ChunkResult]:
        """See `stepwell.tiers.media.movers.Mover.write`."""
        return self._ready(paths).write(paths, records, within_s) if paths else []

    def close(self) -> None:
        """See `stepwell.tiers.media.movers.Mover.close`."""
        if self._mover is not None:
            self._mover.close()

    def _ready(self, paths: Sequence[str]) -> Mover:
        """The way; a tool, which checks nothing, has it chosen now, by where the records lie."""
        if self._mover is None:
            try:
                self._mover = self._chosen(os.path.dirname(paths[0]))
            except ConfigError as error:
                raise TierError(str(error)) from error
        return self._mover


@dataclass(slots=True)
class _Request:
    """What comes back with a result, which do not come in the order of submission."""

    idx: int


class _Rings:
    """A ring to read and one to write, and memory that 3FS maps as well.

    See `stepwell.tiers.media.movers.FileEngine`. One thread at a time, as `prepare` demands.

    When the library fails otherwise than by an OSError, nobody knows what is in flight: the rings
    and the memory are not used any more, nor given up.

    Args:
        library: `hf3fs_fuse.io`.
        mount: of 3FS.
        size_bytes: of the memory.
        kept: those that are not used any more, of all engines of one medium.

    Raises:
        OSError: there is no memory, or no ring.
    """

    def __init__(self, library: Any, mount: str, size_bytes: int, kept: list["_Rings"]) -> None:
        if len(kept) >= _MAX_KEPT:
            raise OSError(errno.ENOTRECOVERABLE, f"the library failed {len(kept)} times")
        self._library = library
        self._kept = kept
        self._told_s = -math.inf
        self._requests: dict[int, _Request] = {}
        shared: Any = SharedMemory(create=True, size=size_bytes)
        self._shared = shared
        with contextlib.ExitStack() as undo:
            undo.callback(shared.close)
            try:
                _allocate(f"{_SHARED}/{shared.name}", size_bytes)
                self._iovec = library.make_iovec(shared, mount)
                self._rings = {
                    write: library.make_ioring(mount, _ENTRIES, for_read=not write)
                    for write in (False, True)
                }
            finally:
                shared.unlink()  # whoever has mapped it keeps it, and a kill leaves nothing
            undo.pop_all()
        self.memory: memoryview = shared.buf

    def move(self, pieces: Sequence[Piece], *, write: bool) -> list[int]:
        """See `stepwell.tiers.media.movers.FileEngine.move`."""
        counts: list[int] = []
        try:
            for begin in range(0, len(pieces), _ENTRIES):
                counts += self._move(pieces[begin : begin + _ENTRIES], write=write)
            if write:
                for idx, piece in enumerate(pieces):
                    # Others take a file for as long as 3FS has been told that it is.
                    if counts[idx] >= 0 and self._library.force_fsync(piece.fd):
                        counts[idx] = -errno.EIO
        except Exception as error:  # counted by whoever wanted this
            self.memory = memoryview(b"")  # so that others are made in their place
            self._kept.append(self)
            logger.warning("the library of 3FS fails; kept=%d error=%r", len(self._kept), error)
            raise TierError(f"the library of 3FS fails: error={error!r}") from error
        return counts

    def _move(self, pieces: Sequence[Piece], *, write: bool) -> list[int]:
        counts = [-errno.EIO] * len(pieces)
        ring = self._rings[write]
        # Objects of this call alone, since the library counts references to them without the
        # interpreter's lock; they have to live until the results are there.
        requests = self._requests = {}
        with contextlib.ExitStack() as stack:
            for idx, piece in enumerate(pieces):
                request = _Request(idx)
                try:
                    self._library.register_fd(piece.fd)
                    stack.callback(self._library.deregister_fd, piece.fd)
                    part = self._iovec[piece.offset : piece.offset + piece.size_bytes]
                    ring.prepare(part, not write, piece.fd, 0, request)
                except OSError as error:
                    counts[idx] = -(error.errno or errno.EIO)
                else:
                    requests[idx] = request
            self._wait(ring, requests, counts)
        return counts

    def _wait(self, ring: Any, requests: dict[int, _Request], counts: list[int]) -> None:
        """Until all is over: from `prepare` on, any of it may be done at any time."""
        is_submitted = False
        while requests:
            try:
                if not is_submitted:
                    ring.submit()
                    is_submitted = True
                most = len(requests)
                results = ring.wait(max_results=most, min_results=1, timeout=_PATIENCE)
            except OSError as error:
                if error.errno not in (errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR):
                    self._tell(error)
                time.sleep(_AGAIN_S)
                continue
            for result in results:
                request: _Request = result.userdata
                if requests.pop(request.idx, None) is request:
                    counts[request.idx] = result.result

    def _tell(self, error: OSError) -> None:
        """It may go on for as long as the process."""
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            logger.warning("a ring fails, and is asked again: error=%s", error)

    def close(self) -> None:
        """See `stepwell.tiers.media.transfer_engines.TransferEngine.close`."""
        if self in self._kept:
            return
        self._rings.clear()
        self._iovec = None
        self.memory = memoryview(b"")
        with contextlib.suppress(BufferError):  # somebody still looks at it: it goes later
            self._shared.close()


def _allocate(path: str, size_bytes: int) -> None:
    """Where there is no such space, the first touch would be the process' end."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        what = f"shared memory of {size_bytes} bytes: {error.strerror}"
        raise OSError(error.errno, what, _SHARED) from error
