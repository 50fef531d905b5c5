"""Reading records whole and saying what is wrong with them, on several threads."""

import errno
import os
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from stepwell.core.identity import Identity
from stepwell.core.keys import Root, fingerprint, root_of
from stepwell.core.memory import aligned_memory
from stepwell.core.record import HEADER_BYTES, PAGE_BYTES, Header, record_bytes
from stepwell.core.types import Reason
from stepwell.errors import DataError
from stepwell.ops.contents import Contents, open_extent
from stepwell.ops.findings import PADDING, UNREADABLE, Bad, Remedy
from stepwell.tiers.directory import FoundExtent
from stepwell.tiers.slots import place_of, slot_of

__all__ = ["Examiner", "Named", "Verdict", "verdicts"]

_NUM_THREADS = 4
_PIECE_BYTES = 4 << 20

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Named:
    """A slot, and what should lie in it.

    Attributes:
        place: extent and slot.
        tag: fingerprint of the chunk's key.
        root: the chunk's.
    """

    place: int
    tag: int
    root: Root


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one slot's record is.

    Attributes:
        named: what was looked at.
        size_bytes: of the slot.
        bad: None for a good record.
        expired: a good one whose time has run out.
        wiped: it was invalidated, and the journal does not have that yet.
    """

    named: Named
    size_bytes: int
    bad: Bad | None = None
    expired: bool = False
    wiped: bool = False


def verdicts(
    contents: Contents, examiner: "Examiner", closed: Container[str] = ()
) -> Iterator[Verdict]:
    """Look at every record, a few megabytes ahead of the caller; neighbours in one read.

    Args:
        contents: says where they lie.
        examiner: looks at them.
        closed: paths of extents that cannot be read; passed over.
    """
    window: deque[Future[list[Verdict]]] = deque()
    with (
        ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="stepwell-check") as pool,
        _set_at_the_end(examiner.stop),  # an interrupt does not wait for large records
    ):
        for extent, portion in _portions(contents):
            if extent.path in closed:
                continue
            window.append(pool.submit(examiner.look_at, extent, portion))
            if len(window) >= 2 * _NUM_THREADS:
                yield from window.popleft().result()
        while window:
            yield from window.popleft().result()


def _portions(contents: Contents) -> Iterator[tuple[FoundExtent, list[Named]]]:
    """The slots that are to hold records, in the order in which they lie, a piece at a time."""
    rows = contents.rows[np.argsort(contents.rows["place"])]
    roots = contents.image.roots
    for extent in contents.extents:
        bounds = [place_of(extent.extent_id, 0), place_of(extent.extent_id + 1, 0)]
        first, end = np.searchsorted(rows["place"], np.array(bounds, np.uint64)).tolist()
        most = max(1, _PIECE_BYTES // extent.slot_bytes)
        for begin in range(first, end, most):
            part = rows[begin : min(begin + most, end)]
            columns = (part[name].tolist() for name in ("place", "tag", "root"))
            yield (
                extent,
                [
                    Named(place, tag, roots[number])
                    for place, tag, number in zip(*columns, strict=True)
                ],
            )


def _runs(portion: Sequence[Named]) -> Iterator[Sequence[Named]]:
    """Split where slots are not neighbours."""
    begin = 0
    for idx in range(1, len(portion) + 1):
        if idx == len(portion) or portion[idx].place != portion[idx - 1].place + 1:
            yield portion[begin:idx]
            begin = idx


@contextmanager
def _set_at_the_end(event: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        event.set()


class Examiner:
    """Looks at records. Threading: any thread; takes about 4 MiB for each.

    Args:
        identities: the roots' descriptions; what a root's chunks measure is checked where known.
        now_s: seconds since the epoch, to tell what has expired.
    """

    def __init__(self, identities: Mapping[Root, Identity | None], now_s: float) -> None:
        self.stop = threading.Event()
        """Set when nobody waits for verdicts any more."""
        self._now_us = int(now_s * 1e6)
        self._chunk_bytes = {
            root: identity.fields.get("chunk_bytes")
            for root, identity in identities.items()
            if identity is not None
        }

    def look_at(self, extent: FoundExtent, portion: Sequence[Named]) -> list[Verdict]:
        """Verdicts of slots in the order in which they lie; never raises for what a drive does."""
        try:
            with open_extent(extent.path) as fd:
                return [each for run in _runs(portion) for each in self._look_at(fd, extent, run)]
        except OSError as error:
            return [self._failed(extent, named, error) for named in portion]

    def _look_at(self, fd: int, extent: FoundExtent, run: Sequence[Named]) -> Iterator[Verdict]:
        """Neighbours, in one read unless they are larger than a piece."""
        slot_bytes = extent.slot_bytes
        if slot_bytes * len(run) > _PIECE_BYTES:
            for named in run:
                yield self._look_at_one(fd, extent, named)
            return
        offset = slot_of(run[0].place)[1] * slot_bytes
        try:
            data = next(_pieces(fd, offset, slot_bytes * len(run)), memoryview(b""))
        except OSError as error:
            if len(run) == 1:
                yield self._failed(extent, run[0], error)
                return
            for named in run:  # one bad sector is the fault of one record
                yield from self._look_at(fd, extent, [named])
            return
        for idx, named in enumerate(run):
            slot = data[idx * slot_bytes : (idx + 1) * slot_bytes]
            body = [slot[HEADER_BYTES:]]
            yield self._verdict(extent, named, slot[:HEADER_BYTES], body)

    def _look_at_one(self, fd: int, extent: FoundExtent, named: Named) -> Verdict:
        """One large record, a piece at a time."""
        offset = slot_of(named.place)[1] * extent.slot_bytes
        try:
            page = bytes(next(_pieces(fd, offset, HEADER_BYTES), b""))
            body = _pieces(fd, offset + HEADER_BYTES, extent.slot_bytes - HEADER_BYTES)
            return self._verdict(extent, named, page, body)
        except OSError as error:
            return self._failed(extent, named, error)

    def _verdict(
        self,
        extent: FoundExtent,
        named: Named,
        page: memoryview | bytes,
        body: Iterable[memoryview],
    ) -> Verdict:
        try:
            header = Header.unpack(page)
            self._verify_header(header, named, extent.slot_bytes)
            self._verify_body(header, body, extent.slot_bytes - HEADER_BYTES)
        except DataError as error:
            detail = str(error)
            if len(page) == HEADER_BYTES and _blank(page):
                # An engine wipes the header and leaves the payload; a drive that lost a write
                # or a file system after a power cut has zeros all over.
                if not all(map(_blank, body)):
                    return Verdict(named, extent.slot_bytes, wiped=True)
                detail = "there is nothing, its write was lost"
            bad = _bad(extent, named, str(error.reason), detail, Remedy.SET_ASIDE)
            return Verdict(named, extent.slot_bytes, bad)
        return Verdict(named, extent.slot_bytes, expired=0 < header.expires_at_us <= self._now_us)

    def _verify_header(self, header: Header, named: Named, slot_bytes: int) -> None:
        """In the order in which a reader checks.

        Raises:
            DataError: IDENTITY or LAYOUT.
        """
        if root_of(header.key) != named.root or fingerprint(header.key) != named.tag:
            raise DataError(
                f"the record is another chunk's: found={header.key.hex()}", Reason.IDENTITY
            )
        if record_bytes(header.payload_bytes) != slot_bytes:
            raise DataError(
                f"a record of another size than its slot: "
                f"record_bytes={record_bytes(header.payload_bytes)} slot_bytes={slot_bytes}",
                Reason.LAYOUT,
            )
        chunk_bytes = self._chunk_bytes.get(named.root)
        if isinstance(chunk_bytes, int) and header.payload_bytes != chunk_bytes:
            raise DataError(
                f"another length than its root's chunks: expected_bytes={chunk_bytes} "
                f"found_bytes={header.payload_bytes}",
                Reason.LAYOUT,
            )

    def _verify_body(self, header: Header, body: Iterable[memoryview], body_bytes: int) -> None:
        """Check payload and padding, a piece at a time.

        Raises:
            DataError: TRUNCATED, CHECKSUM or PADDING.
            OSError: from the system.
        """
        digest = xxhash.xxh3_128()
        payload_bytes, rest_bytes, clean = header.payload_bytes, body_bytes, True
        for piece in body:
            payload = piece[:payload_bytes]
            digest.update(payload)
            payload_bytes -= len(payload)
            rest_bytes -= len(piece)
            clean = clean and _blank(piece[len(payload) :])
            if self.stop.is_set():
                raise InterruptedError  # nobody waits for the verdict any more
        if rest_bytes:
            raise DataError("the extent ends before the record does", Reason.TRUNCATED)
        if digest.digest() != header.checksum:
            raise DataError("payload checksum is wrong", Reason.CHECKSUM)
        if not clean:
            raise DataError("the bytes after the payload are not zero", PADDING)

    def _failed(self, extent: FoundExtent, named: Named, error: OSError) -> Verdict:
        reason, remedy = UNREADABLE, Remedy.LEAVE
        if error.errno == errno.EIO:
            reason, remedy = Reason.IO_ERROR.value, Remedy.SET_ASIDE
        bad = _bad(extent, named, reason, str(error.strerror), remedy)
        return Verdict(named, extent.slot_bytes, bad)


def _blank(piece: memoryview | bytes) -> bool:
    return not bytes(piece).strip(b"\0")


def _bad(extent: FoundExtent, named: Named, reason: str, detail: str, remedy: Remedy) -> Bad:
    return Bad(extent.path, reason, detail, extent.slot_bytes, remedy, named.place)


def _pieces(fd: int, offset: int, length: int) -> Iterator[memoryview]:
    """Up to ``length`` bytes, whole pages, from ``offset`` on; a piece is valid until the next."""
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None:  # aligned, as O_DIRECT wants it
        buffer = _local.buffer = aligned_memory(_PIECE_BYTES)
    while length > 0:
        wanted = min(length, _PIECE_BYTES)
        done = os.preadv(fd, [buffer[:wanted]], offset)
        while 0 < done < wanted and done % PAGE_BYTES == 0:
            more = os.preadv(fd, [buffer[done:wanted]], offset + done)
            if more == 0:
                break
            done += more
        if done == 0:
            return
        yield buffer[:done]
        if done < wanted:
            return  # the file's end
        offset += done
        length -= done
