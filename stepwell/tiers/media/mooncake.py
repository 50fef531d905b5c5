"""Mooncake Store: records in the memory of its nodes, found through its master."""

import contextlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stepwell.core.keys import Key, Root
from stepwell.core.record import HEADER_BYTES, pad_to_page
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.tiers.media.base import Page, Record, Stats, Wanted
from stepwell.tiers.media.mooncake_client import Connection, Turn
from stepwell.tiers.media.mooncake_setup import (
    check_devices,
    connect,
    load_library,
    may_close,
    target_of,
)
from stepwell.tiers.media.records import ABSENT, LAYOUT, name_of, root_name, split
from stepwell.tiers.media.roots import DESCRIPTIONS, description_key
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, FAILED, NO_ROOM

__all__ = ["MooncakeMedium", "open_medium"]

logger = logging.getLogger(__name__)

# The library's codes (mooncake-store/include/types.h).
_NO_ROOM = frozenset({-200, -1700})  # no space in any segment, the tenant's quota is used up
_MISFIT = -600  # the memory is too small for the object, among other things
_NOT_THERE = frozenset({-703, -704})  # not written to its end, not found
_NO_ANSWER = frozenset({-900, -901})

# Somebody has begun to write it. If he died, the master gives the name free after half a minute.
_TAKEN = ChunkResult(Outcome.FULL, Reason.DEADLINE)

# A full pool evicts while it refuses, and others finish what they write: for so long we try again,
# and for no more than a part of the patience with the other side, since it does answer.
_ROOM_WITHIN_S = 2.0
_ROOM_PART = 0.25
_ROOM_AGAIN_S = 0.05
_ERASE_WITHIN_S = 60.0
# Over TCP more at once are no faster, and cost more CPU (docs/MOONCAKE.md).
_TRANSFERS = {"tcp": 2, "rdma": 8}
_LEAST_S = 0.05


def open_medium(url: MediumUrl, timeout_s: float) -> "MooncakeMedium":
    """The Mooncake that a URL names; nobody is asked yet.

    ``mooncake://master[:50051]``. Parameters: ``protocol`` (tcp, or rdma) and for rdma
    ``devices``; ``metadata`` as the nodes have it (P2PHANDSHAKE, or http:// or etcd://);
    ``replicas`` of each record (1); ``tenant``; ``prefix`` of all names (stepwell); ``host``,
    this machine's address towards the nodes. For several masters ``ha=etcd``, and the address is
    etcd's, further ones in ``more``: ``mooncake://etcd1:2379?ha=etcd&more=etcd2:2379,etcd3:2379``.

    The library's own patience is set by the environment, of the whole process: that of the first
    medium counts, and what the environment has already comes before it.

    Args:
        url: see above.
        timeout_s: how long master and nodes may keep silent.

    Raises:
        ConfigError: the URL is wrong, or the library cannot be loaded.
    """
    target = target_of(url)
    library = load_library(url, timeout_s)
    connection = Connection(
        lambda: connect(library, target, timeout_s),
        may_close=lambda: may_close(target, timeout_s),
    )
    config = library.ReplicateConfig()
    config.replica_num = target.replicas
    transfers = _TRANSFERS[target.protocol]
    return MooncakeMedium(
        connection, target.prefix, url.shown, timeout_s, config, transfers,
        lambda: check_devices(target),
    )  # fmt: skip


class MooncakeMedium:
    """Records as objects ``prefix/root/key``. See `stepwell.tiers.media.base.Medium`.

    A record goes through memory that is registered with the library, since a call that is late
    goes on writing to its own: one copy each way. What the library says is there is a hint: for
    some seconds it says so of what has gone with its node.

    Args:
        connection: to the library.
        prefix: of all names.
        shown: the URL, for messages.
        timeout_s: for what nobody else limits; a write that waits for room takes a quarter of it.
        config: how objects are put, of the library.
        transfers: that run at once.
        check_machine: raises ConfigError where this machine lacks something.

    Attributes:
        num_short: records written that have fewer replicas than were asked for.
    """

    def __init__(
        self,
        connection: Connection,
        prefix: str,
        shown: str,
        timeout_s: float,
        config: Any,
        transfers: int = 2,
        check_machine: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._prefix = prefix
        self._shown = shown
        self._timeout_s = timeout_s
        self._config = config
        self._transfers = threading.BoundedSemaphore(transfers)
        self._check_machine = check_machine
        self._lock = threading.Lock()
        self.num_short = 0

    def check(self) -> None:
        """See `stepwell.tiers.media.base.Medium.check`."""
        try:
            self._check_machine()
        except ConfigError as error:
            raise ConfigError(f"{error} url={self._shown}") from error
        name = f"{self._prefix}/check"
        with self._turn("check", 0, self._timeout_s) as turn:
            _asked(turn, [name])

    def exist(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `stepwell.tiers.media.base.Medium.exist`."""
        with self._turn("lookup", 0, within_s) as turn:
            return [code > 0 for code in _asked(turn, self._names(keys))]

    def read(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.read`."""
        names = self._names([each.key for each in wanted])
        sizes = [HEADER_BYTES + len(each.payload) for each in wanted]
        begins, whole = _places(sizes)
        with self._turn("read", whole, within_s) as turn:
            for begin in begins:  # what is said to have been read, and was not, is no record
                turn.memory[begin : begin + HEADER_BYTES] = bytes(HEADER_BYTES)
            places = [turn.address + begin for begin in begins]
            lengths = self._transfer(
                "read", turn, lambda client: client.batch_get_into(names, places, sizes)
            )
            self._find_lengths(turn, names, sizes, lengths)
            parts = zip(begins, sizes, lengths, wanted, strict=True)
            return [
                _read(turn.memory[begin : begin + size], length, each)
                for begin, size, length, each in parts
            ]

    def write(self, records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.write`."""
        names = self._names([record.key for record in records])
        sizes = [HEADER_BYTES + len(record.payload) for record in records]
        begins, whole = _places(sizes)
        results = [ALREADY_THERE] * len(records)
        with self._turn("write", whole, within_s) as turn:
            new = [idx for idx, code in enumerate(_asked(turn, names)) if code <= 0]
            for idx in new:
                _fill(turn.memory[begins[idx] : begins[idx] + sizes[idx]], records[idx])
            places = [turn.address + begin for begin in begins]
            room_within_s = min(_ROOM_WITHIN_S, self._timeout_s * _ROOM_PART, turn.left_s / 2)
            give_up_s = time.monotonic() + room_within_s
            left = new
            while left:
                self._put(turn, names, places, sizes, left, results)
                left = [idx for idx in left if results[idx] in (NO_ROOM, _TAKEN)]
                if not left or time.monotonic() >= give_up_s:
                    break
                time.sleep(_ROOM_AGAIN_S)  # it makes room, or somebody else writes the same
        return results

    def remove(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.remove`; also of what a reader has leased."""
        names = self._names(keys)
        with self._turn("remove", 0, within_s) as turn:
            for code in turn.call(lambda client: list(client.batch_remove(names, True))):
                if code < 0 and code not in _NOT_THERE:
                    raise TierError(f"code={code}")

    def touch(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.touch`; what is asked for is recent."""
        self.exist(keys, within_s)

    def erase(self, root: Root) -> int:
        """See `stepwell.tiers.media.base.Medium.erase`."""
        pattern = f"^{re.escape(self._prefix)}/{root_name(root)}/"
        with self._turn("erase", 0, _ERASE_WITHIN_S) as turn:
            (count,) = turn.call(lambda client: [client.remove_by_regex(pattern, True)])
            if count < 0:
                raise TierError(f"code={count}")
            return count

    def keys(self, root: Root) -> None:
        """See `stepwell.tiers.media.base.Medium.keys`; clients cannot list."""

    def stats(self, within_s: float) -> Stats:
        """See `stepwell.tiers.media.base.Medium.stats`; clients are not told more than whether the
        master is there.
        """
        self.exist([description_key(DESCRIPTIONS)], within_s)
        return Stats()

    def close(self) -> None:
        """See `stepwell.tiers.media.base.Medium.close`."""
        self._connection.close()

    @contextlib.contextmanager
    def _turn(self, what: str, size_bytes: int, within_s: float) -> Iterator[Turn]:
        try:
            with self._connection.turn(size_bytes, max(within_s, _LEAST_S)) as turn:
                yield turn
        except TierError as error:
            raise TierError(f"mooncake {what} failed: url={self._shown} error={error}") from error

    def _names(self, keys: Sequence[Key]) -> list[str]:
        return ["/".join((self._prefix, *name_of(key))) for key in keys]

    def _transfer(self, what: str, turn: Turn, work: Callable[[Any], Sequence[int]]) -> list[int]:
        if not self._transfers.acquire(timeout=turn.left_s):
            raise TierError("other transfers take too long")
        try:
            codes = list(turn.call(work))
        finally:
            self._transfers.release()
        if codes and all(code in _NO_ANSWER for code in codes):
            raise TierError(f"the master does not answer: code={codes[0]}")
        self._log(what, codes)
        return codes

    def _put(
        self,
        turn: Turn,
        names: Sequence[str],
        places: Sequence[int],
        sizes: Sequence[int],
        idxs: Sequence[int],
        results: list[ChunkResult],
    ) -> None:
        """Put some of them, and what became of each in its place."""
        some = [[each[idx] for idx in idxs] for each in (names, places, sizes)]
        codes = self._transfer(
            "write", turn, lambda client: client.batch_put_from(*some, self._config)
        )
        for idx, code in zip(idxs, codes, strict=True):
            results[idx] = _written(code)
        self._verify(turn, names, results, [idx for idx in idxs if results[idx] == DONE])

    def _find_lengths(
        self, turn: Turn, names: Sequence[str], sizes: Sequence[int], lengths: list[int]
    ) -> None:
        """Of what does not fit where it was to be read to."""
        misfits = [idx for idx, length in enumerate(lengths) if length == _MISFIT]
        if misfits:
            some = [names[idx] for idx in misfits]
            found = turn.call(lambda client: [client.get_size(name) for name in some])
            for idx, length in zip(misfits, found, strict=True):
                if length > sizes[idx] or length < 0:
                    lengths[idx] = length

    def _verify(
        self, turn: Turn, names: Sequence[str], results: list[ChunkResult], idxs: Sequence[int]
    ) -> None:
        """Whether what was put is there, since a name that somebody else has is taken for put."""
        some = [names[idx] for idx in idxs]
        if not some:
            return
        asked_for = self._config.replica_num

        def num_replicas(client: Any) -> list[int]:
            if asked_for == 1:
                return list(client.batch_is_exist(some))
            found = client.batch_get_replica_desc(some)
            return [len(found.get(name, ())) for name in some]

        counts = turn.call(num_replicas)
        for idx, count in zip(idxs, counts, strict=True):
            if count == 0:
                results[idx] = _TAKEN
            elif count < 0:  # it may be there, or not: nobody knows
                results[idx] = FAILED
        self._log("lookup", counts)
        short = [count for count in counts if 0 < count < asked_for]
        if not short:
            return
        with self._lock:
            is_first = not self.num_short
            self.num_short += len(short)
        if is_first:
            logger.warning(
                "Mooncake keeps fewer replicas than asked for; are there so many nodes with room? "
                "This is said once: url=%s replicas=%d kept=%d", self._shown, asked_for, min(short),
            )  # fmt: skip

    def _log(self, what: str, codes: Sequence[int]) -> None:
        """Say what is wrong; each chunk's result says only that something is."""
        expected = _NOT_THERE | _NO_ROOM | {_MISFIT}
        unexpected = Counter(code for code in codes if code < 0 and code not in expected)
        if unexpected:
            logger.warning(
                "mooncake %s: url=%s codes=%s", what, self._shown, dict(unexpected),
            )  # fmt: skip


def _asked(turn: Turn, names: list[str]) -> Sequence[int]:
    """Ask what is there: 1 or 0 each."""
    codes = turn.call(lambda client: list(client.batch_is_exist(names)))
    for code in codes:
        if code < 0:
            raise TierError(f"code={code}")
    return codes


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of memory begin, each on a page of its own, and how much that is."""
    begins: list[int] = []
    end = 0
    for size in sizes:
        begins.append(end)
        end += pad_to_page(size)
    return begins, end


def _fill(memory: memoryview, record: Record) -> None:
    memory[:HEADER_BYTES] = record.header
    _copy(record.payload, memory[HEADER_BYTES:])


def _copy(source: memoryview, target: memoryview) -> None:
    """As an array, since that lets others run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _read(memory: memoryview, length: int, wanted: Wanted) -> Page | ChunkResult:
    if length in _NOT_THERE:
        return ABSENT
    if length < 0:
        return FAILED
    if length > len(memory):
        return LAYOUT
    if length < len(memory):
        return split(memory[:length], wanted.payload)  # says what is wrong with it
    _copy(memory[HEADER_BYTES:], wanted.payload)
    return bytes(memory[:HEADER_BYTES])  # the memory is somebody else's soon


def _written(code: int) -> ChunkResult:
    if code in _NO_ROOM:
        return NO_ROOM
    return FAILED if code < 0 else DONE
