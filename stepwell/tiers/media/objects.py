"""Object stores: S3 and what speaks like it, Google Cloud Storage, Azure; a record is an object."""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import obstore
from obstore.exceptions import AlreadyExistsError

from stepwell.core.keys import Key, Root, make_key
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult
from stepwell.errors import ConfigError, TierError
from stepwell.tiers.media.base import Page, Record, Stats, Wanted
from stepwell.tiers.media.object_stores import (
    ERRORS,
    doubts_the_length,
    open_store,
    refusal,
    status_of,
    words_of,
)
from stepwell.tiers.media.records import ABSENT, TRUNCATED, name_of, other_length, root_name
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, FAILED

if TYPE_CHECKING:
    from obstore import GetOptions

__all__ = ["ObjectMedium", "open_medium"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE = 32
# One connection to a large store carries some 100 MB/s: what is larger goes over several.
_PART_BYTES = 8 << 20
# A record is put whole, on the condition that there is none, up to this.
_MOST_AT_ONCE_BYTES = 32 << 20
_WRITTEN_PART_BYTES = 16 << 20
_LIST_AT_ONCE = 1000  # the most that S3 lists with one request
_ERASE_WITHIN_S = 60.0
_CHECK_WITHIN_S = 10.0
_SIGNED_FOR = timedelta(seconds=60)
_PROBE = b"stepwell"
_NOT_IMPLEMENTED = 501

_Content = npt.NDArray[np.uint8]


def open_medium(url: MediumUrl, timeout_s: float) -> "ObjectMedium":
    """The bucket that a URL names: ``s3://bucket/prefix``, ``gs://`` and ``az://`` likewise.

    It is not asked yet. `stepwell.tiers.media.object_stores.open_store` has the parameters, and
    where credentials come from.

    Args:
        url: see above.
        timeout_s: of one request. It is tried again within that time, and no longer.

    Raises:
        ConfigError: the URL is wrong, or credentials are half given.
    """
    endpoint = url.parameters.get("endpoint")
    shown = f"{url.shown} endpoint={endpoint}" if endpoint else url.shown
    return ObjectMedium(open_store(url, timeout_s), shown, url.scheme)


@dataclass(frozen=True, slots=True)
class _Able:
    """What stores that speak like S3 do not all do.

    Attributes:
        creates: refuses to write over an object when told to.
        ranges: gives parts of an object.
    """

    creates: bool
    ranges: bool


class ObjectMedium:
    """Records as objects ``root/key``. See `stepwell.tiers.media.base.Medium`.

    Requests go out up to 32 at once, of all calls together, on threads of this medium's. A request
    whose caller has given up goes on until its own time is over, in memory of its own: what is
    read lies in obstore's memory until the caller copies it, and what is written is a copy.

    Args:
        store: from obstore; each of its requests ends by itself.
        shown: the URL, for messages.
        scheme: of the URL.
    """

    def __init__(self, store: Any, shown: str, scheme: str) -> None:
        self._store = store
        self._shown = shown
        self._scheme = scheme
        self._threads = ThreadPoolExecutor(_AT_ONCE, f"stepwell-{scheme}")
        self._able: _Able | None = None  # until it was tried
        self._closed = False
        self._lock = threading.Lock()
        self._puts: set[Future[ChunkResult]] = set()

    def check(self) -> None:
        """See `stepwell.tiers.media.base.Medium.check`."""
        give_up_s = time.monotonic() + _CHECK_WITHIN_S
        try:
            self._all([self._try_everything], give_up_s)
        except ERRORS as error:
            raise refusal(error, self._shown, self._scheme) from error

    def _try_everything(self) -> None:
        """All that an engine does, with an object of its own."""
        if self._scheme == "s3":
            # Needs credentials, and nothing of the store: which of the two fails is known.
            obstore.sign(self._store, "GET", "check", _SIGNED_FOR)
        with self._probe() as (name, _):
            content = bytes(obstore.get(self._store, name).bytes())
            if content != _PROBE:
                raise TierError(f"the store gives back what was not written: url={self._shown}")
        try:
            # Whoever may not list is told that he may not see what is not there.
            obstore.head(self._store, name)
        except FileNotFoundError:
            return
        raise ConfigError(f"the store keeps what is deleted: url={self._shown}")

    @contextlib.contextmanager
    def _probe(self) -> Iterator[tuple[str, _Able]]:
        """An object of ours for a moment; finds out what the store does with it."""
        name = f"check-{secrets.token_hex(8)}"
        try:
            able = _Able(self._refuses_to_write_over(name), self._gives_parts(name))
            if able != self._able and not (able.creates and able.ranges):
                logger.warning(
                    "the store does not do all that S3 does; what two engines write at once is "
                    "written twice, or large chunks go over one connection: url=%s "
                    "conditional_put=%s ranges=%s", self._shown, able.creates, able.ranges,
                )  # fmt: skip
            self._able = able
            yield name, able
        except (*ERRORS, TierError):
            # It may be there all the same, but nobody waits for a server that hangs once more.
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._threads.submit(self._delete, name)
            raise
        self._delete(name)

    def _refuses_to_write_over(self, name: str) -> bool:
        try:
            obstore.put(self._store, name, _PROBE, mode="create")
            obstore.put(self._store, name, _PROBE, mode="create")
        except AlreadyExistsError:
            return True
        except ERRORS as error:
            if status_of(error) != _NOT_IMPLEMENTED:
                raise
            obstore.put(self._store, name, _PROBE)
        return False

    def _gives_parts(self, name: str) -> bool:
        try:
            part = obstore.get(self._store, name, options={"range": (1, 3)}).bytes()
        except ERRORS as error:
            if not doubts_the_length(error):
                raise
            return False
        return bytes(part) == _PROBE[1:3]

    def exist(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `stepwell.tiers.media.base.Medium.exist`: a request for each, as there is no other
        way to ask for names that have no beginning in common.
        """
        give_up_s = time.monotonic() + within_s
        try:
            return self._all([partial(self._exists, _name(key)) for key in keys], give_up_s)
        except ERRORS as error:
            raise self._failure("head", error) from error

    def _exists(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def read(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.read`."""
        give_up_s = time.monotonic() + within_s
        # Who only looks at what is there does not try what the store can do: that takes writing.
        in_parts = self._able is not None and self._able.ranges
        pieces = [self._submit(self._pieces(each, in_parts)) for each in wanted]
        errors: list[BaseException] = []
        try:
            return [
                self._put_in_place(futures, each.payload, give_up_s, errors)
                for futures, each in zip(pieces, wanted, strict=True)
            ]
        finally:
            self._log("get", errors)
            for futures in pieces:
                _cancel(futures)

    def _pieces(self, wanted: Wanted, in_parts: bool) -> list[Callable[[], Any]]:
        """What gets a record: its object, or parts of it."""
        name, size = _name(wanted.key), HEADER_BYTES + len(wanted.payload)
        step = _PART_BYTES if in_parts else size
        return [
            partial(self._get, name, begin, min(begin + step, size), size)
            for begin in range(0, size, step)
        ]

    def _get(self, name: str, begin: int, end: int, size: int) -> _Content | ChunkResult:
        """Bytes from ``begin`` to ``end`` of an object of ``size`` bytes, or what is wrong."""
        in_part = end - begin < size
        try:
            options: GetOptions | None = {"range": (begin, end)} if in_part else None
            found = obstore.get(self._store, name, options=options)
            if found.meta["size"] == size:
                content = np.frombuffer(memoryview(found.bytes()), np.uint8)
                return content if len(content) == end - begin else TRUNCATED
        except FileNotFoundError:
            return ABSENT
        except ERRORS as error:
            # Of a shorter object a part cannot be had, and what is said then differs.
            short = in_part and doubts_the_length(error)
            if not short or obstore.head(self._store, name)["size"] == size:
                raise
        return self._other_length(name, size - HEADER_BYTES)

    def _other_length(self, name: str, payload_bytes: int) -> ChunkResult:
        """What an object is that has not the length it should have: no more than its first page
        is taken in.
        """
        found = obstore.get(self._store, name)
        page = b""
        for piece in found.stream(HEADER_BYTES):
            page += bytes(piece)
            if len(page) >= HEADER_BYTES:
                return other_length(memoryview(page), found.meta["size"], payload_bytes)
        return TRUNCATED

    def _put_in_place(
        self,
        futures: Sequence[Future[Any]],
        payload: memoryview,
        give_up_s: float,
        errors: list[BaseException],
    ) -> Page | ChunkResult:
        """Copy what has come; in the caller's thread, so never after the call."""
        page = b""
        place = np.frombuffer(payload, np.uint8)
        for future in futures:
            try:
                content = self._result(future, give_up_s)
            except ERRORS as error:
                errors.append(error)
                return FAILED
            if isinstance(content, ChunkResult):
                return content
            if not page:
                page, content = content[:HEADER_BYTES].tobytes(), content[HEADER_BYTES:]
            np.copyto(place[: len(content)], content)
            place = place[len(content) :]
        return page

    def write(self, records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.write`."""
        give_up_s = time.monotonic() + within_s
        able = self._able_by(give_up_s)
        futures = self._submit(
            partial(self._put, _name(record.key), _joined(record), able.creates)
            for record in records
        )
        with self._lock:
            self._puts = {future for future in self._puts if not future.done()}.union(futures)
        errors: list[BaseException] = []
        try:
            return [self._written(future, give_up_s, errors) for future in futures]
        finally:
            self._log("put", errors)
            _cancel(futures)

    def _able_by(self, give_up_s: float) -> _Able:
        """What the store does: tried once, unless `check` has."""
        if self._able is None:
            try:
                return self._all([self._try], give_up_s)[0]
            except ERRORS as error:
                raise self._failure("put", error) from error
        return self._able

    def _try(self) -> _Able:
        with self._probe() as (_, able):
            return able

    def _put(self, name: str, content: _Content, creates: bool) -> ChunkResult:
        if creates and len(content) <= _MOST_AT_ONCE_BYTES:
            try:
                obstore.put(self._store, name, content.data, mode="create")
            except AlreadyExistsError:
                # Or somebody was writing or removing it just then: a read will tell.
                return ALREADY_THERE
            return DONE
        # What goes in parts is not put on a condition: of two at once both may write, and the
        # second one's record is as good.
        if self._exists(name):
            return ALREADY_THERE
        begins = range(0, len(content), _WRITTEN_PART_BYTES)
        parts = [content[begin : begin + _WRITTEN_PART_BYTES].data for begin in begins]
        obstore.put(
            self._store, name, parts, chunk_size=_WRITTEN_PART_BYTES,
            use_multipart=len(content) > _MOST_AT_ONCE_BYTES,
        )  # fmt: skip
        return DONE

    def _written(
        self, future: Future[ChunkResult], give_up_s: float, errors: list[BaseException]
    ) -> ChunkResult:
        try:
            return self._result(future, give_up_s)
        except ERRORS as error:
            errors.append(error)
            return FAILED

    def remove(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.remove`."""
        self._remove([_name(key) for key in keys], time.monotonic() + within_s)

    def _remove(self, names: Sequence[str], give_up_s: float) -> None:
        # One by one, which every store can: with several at once the first that is not there
        # ends it, except on S3.
        try:
            self._all([partial(self._delete, name) for name in names], give_up_s)
        except ERRORS as error:
            raise self._failure("delete", error) from error

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def touch(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.touch`; there is no such order."""

    def erase(self, root: Root) -> int:
        """See `stepwell.tiers.media.base.Medium.erase`."""
        # What an earlier call has given up goes on, and would come afterwards.
        with self._lock:
            puts = self._puts
        wait(puts, _ERASE_WITHIN_S)
        count = 0
        for names in self._list(root):
            self._remove(names, time.monotonic() + _ERASE_WITHIN_S)
            count += len(names)
        return count

    def keys(self, root: Root) -> Iterator[Key]:
        """See `stepwell.tiers.media.base.Medium.keys`."""
        for names in self._list(root):
            for name in names:
                with contextlib.suppress(ValueError):  # somebody else's
                    yield make_key(root, bytes.fromhex(name.rpartition("/")[2]))

    def _list(self, root: Root) -> Iterator[list[str]]:
        """The names of a root's objects, a thousand at a time."""
        try:
            lists = obstore.list(self._store, f"{root_name(root)}/", chunk_size=_LIST_AT_ONCE)
            for entries in lists:
                yield [entry["path"] for entry in entries]
        except ERRORS as error:
            # Often the first that is asked of it, by a tool.
            why = refusal(error, self._shown, self._scheme)
            raise TierError(f"list failed: {why}") from error

    def stats(self, within_s: float) -> Stats:
        """See `stepwell.tiers.media.base.Medium.stats`: it would take a list of everything."""
        return Stats()

    def close(self) -> None:
        """See `stepwell.tiers.media.base.Medium.close`."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, runs: Iterable[Callable[[], T]]) -> list[Future[T]]:
        try:
            return [self._threads.submit(run) for run in runs]
        except RuntimeError as error:
            why = "the medium is closed" if self._closed else "there is no thread for a request"
            raise TierError(f"{why}: url={self._shown}") from error

    def _all(self, runs: Iterable[Callable[[], T]], give_up_s: float) -> list[T]:
        """Run all at once, in time; the first error is everybody's."""
        futures = self._submit(runs)
        try:
            return [self._result(future, give_up_s) for future in futures]
        finally:
            _cancel(futures)

    def _result(self, future: Future[T], give_up_s: float) -> T:
        try:
            return future.result(max(0.0, give_up_s - time.monotonic()))
        except TimeoutError as error:
            raise TierError(f"the store did not answer in time: url={self._shown}") from error

    def _failure(self, request: str, error: BaseException) -> TierError:
        return TierError(f"{request} failed: url={self._shown} error={words_of(error)}")

    def _log(self, request: str, errors: Sequence[BaseException]) -> None:
        """Say what is wrong; each chunk's result says only that something is."""
        if errors:
            logger.warning(
                "%d of the requests failed: request=%s url=%s error=%s",
                len(errors), request, self._shown, words_of(errors[0]),
            )  # fmt: skip


def _cancel(futures: Iterable[Future[Any]]) -> None:
    """What has not begun by now is not wanted any more; what has ended does not mind."""
    for future in futures:
        future.cancel()


def _joined(record: Record) -> _Content:
    """Header and payload in memory of their own, copied without the interpreter's lock."""
    content = np.empty(HEADER_BYTES + len(record.payload), np.uint8)
    content[:HEADER_BYTES] = np.frombuffer(record.header, np.uint8)
    np.copyto(content[HEADER_BYTES:], np.frombuffer(record.payload, np.uint8))
    return content


def _name(key: Key) -> str:
    return "/".join(name_of(key))
