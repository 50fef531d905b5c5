"""A state machine: the disk tier against a dictionary, on a drive that fails and lies."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepwell.core.keys import Key, fingerprint
from stepwell.core.types import Outcome, Reason
from stepwell.testing import Driver, key_of, payload_of
from stepwell.tiers import blockio, extents, journal
from stepwell.tiers.disk import slot_cost_bytes

from .conftest import DiskPlace

KEYS = [key_of(idx, root) for root in ("one", "two") for idx in range(7)]
LENGTHS = (1, 4096, 5000, 9000)
CAPACITY_BYTES = 9 * slot_cost_bytes(5000)

prefixes = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
BY_FINGERPRINT = {fingerprint(key): key for key in KEYS}

# What may fail: the module that calls, the call, and what it then says.
FAULTS: list[tuple[Any, str, int]] = [
    (blockio, "preadv", errno.EIO),
    (blockio, "pwritev", errno.EIO),
    (blockio, "pwritev", errno.ENOSPC),
    (extents, "posix_fallocate", errno.ENOSPC),
    (extents, "posix_fallocate", errno.EIO),
    (extents, "rename", errno.EIO),
    (extents, "unlink", errno.EIO),
    (extents, "ftruncate", errno.EIO),
    (extents, "statvfs", errno.EIO),
    (journal, "write", errno.ENOSPC),
    (journal, "write", errno.EIO),
    (journal, "replace", errno.EIO),
    (journal, "open", errno.EMFILE),
]


def length_of(key: Key) -> int:
    return LENGTHS[key[-1] % len(LENGTHS)]


class FailingCalls:
    """`os` for one module, whose next calls of one name fail."""

    def __init__(self) -> None:
        self.name, self.error, self.left = "", 0, 0
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self.name:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                self.num_failed += 1
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **kwargs)

        return call


class DiskMachine(RuleBasedStateMachine):
    """Write, read, delete, touch, lease, wait, damage and reopen; calls fail meanwhile.

    The model is the set of what is there, which is exact, since the tier says what it evicts.
    """

    place: DiskPlace
    driver: Driver

    def __init__(self) -> None:
        super().__init__()
        self.there: set[Key] = set()
        self.spoilt: set[Key] = set()
        self.deleted: set[Key] = set()
        self.not_wiped: set[Key] = set()  # only the journal knows that they were deleted
        self.doubtful: set[Key] = set()  # found by their headers, whole or not
        self.expires_s: dict[Key, float] = {}
        self.ttl_s = 0.0
        self.patch = pytest.MonkeyPatch()
        self.systems = {module: FailingCalls() for module in (blockio, extents, journal)}
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="disk-machine-", dir=memory))

    @initialize()
    def start(self) -> None:
        for module, system in self.systems.items():
            self.patch.setattr(module, "os", system)
        self.place = DiskPlace(self.folder / "kv")
        self.open()

    def teardown(self) -> None:
        try:
            if hasattr(self, "place"):
                self.heal()
                self.place.close()
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder, ignore_errors=True)

    def open(self) -> None:
        self.driver = self.place.open(
            capacity_bytes=CAPACITY_BYTES,
            num_threads=1,
            ttl_s=self.ttl_s,
            on_evicted=lambda tag: self.there.discard(BY_FINGERPRINT[tag]),
        )

    def heal(self) -> bool:
        """Nothing fails any more; whether anything did."""
        assert self.place.tier is None or self.place.tier.drain(30)
        failed = sum(system.num_failed for system in self.systems.values())
        for system in self.systems.values():
            system.left = system.num_failed = 0
        return failed > 0

    def forget_expired(self) -> None:
        now_s = self.place.clock.wall()
        self.there -= {key for key, at_s in self.expires_s.items() if 0 < at_s <= now_s}

    @rule(fault=st.sampled_from(FAULTS), times=st.integers(1, 4))
    def break_something(self, fault: tuple[Any, str, int], times: int) -> None:
        """It fails during the next step, or never."""
        module, name, error = fault
        system = self.systems[module]
        system.name, system.error, system.left = name, error, times

    @rule(prefix=prefixes)
    def write(self, prefix: list[Key]) -> None:
        for length in LENGTHS:
            keys = [key for key in prefix if length_of(key) == length]
            if not keys:
                continue
            was_there = self.there & set(keys)
            results = self.driver.write(keys, length)
            for key, result in zip(keys, results, strict=True):
                assert result.reason is not Reason.INTERNAL
                if result.outcome is Outcome.DONE:
                    assert (result.reason is Reason.EXISTS) == (key in was_there)
                    self.there.add(key)
                    self.deleted.discard(key)
                    if result.reason is Reason.NONE:
                        self.spoilt.discard(key)
                        self.doubtful.discard(key)
                        ends_s = int(self.place.clock.wall() + self.ttl_s)
                        self.expires_s[key] = ends_s if self.ttl_s else 0.0
                else:
                    assert key not in was_there
            # What was just written may have left again for what came after it in the job.
            present = self.driver.present(keys)
            self.there -= {k for k, here in zip(keys, present, strict=True) if not here}
        self.heal()

    @rule(prefix=prefixes)
    def read(self, prefix: list[Key]) -> None:
        for length in LENGTHS:
            keys = [key for key in prefix if length_of(key) == length]
            if not keys:
                continue
            result, contents = self.driver.read(keys, length)
            for key, answer, content in zip(keys, result.results, contents, strict=True):
                if key not in self.there:
                    assert answer.outcome is Outcome.MISS
                    assert answer.reason in (Reason.ABSENT, Reason.EXPIRED)
                elif answer.outcome is Outcome.DONE:
                    assert key not in self.spoilt
                    assert content == payload_of(key, length)
                elif answer.outcome is Outcome.FAILED:
                    assert answer.reason is Reason.IO_ERROR
                    assert self.systems[blockio].num_failed > 0
                else:
                    assert key in self.spoilt | self.doubtful
                    assert answer.reason in (Reason.CHECKSUM, Reason.HEADER)
                    self.there.discard(key)
        self.heal()

    @rule(prefix=prefixes)
    def delete(self, prefix: list[Key]) -> None:
        known = self.there & set(prefix)
        count = self.driver.tier.delete(prefix)
        assert len(known) <= count <= len(prefix), "what has expired may count"
        self.there -= set(prefix)
        if self.heal():
            self.not_wiped |= known
        self.deleted |= set(prefix) - self.not_wiped

    @rule(prefix=prefixes)
    def touch(self, prefix: list[Key]) -> None:
        found = [r.outcome is Outcome.DONE for r in self.driver.touch(prefix)]
        for key, here in zip(prefix, found, strict=True):
            assert here or key not in self.there
        self.heal()

    @rule(prefix=prefixes, seconds=st.sampled_from([1.5, 4.0, 1e6]))
    def lease(self, prefix: list[Key], seconds: float) -> None:
        self.place.context.leases.acquire(prefix, seconds)

    @rule(seconds=st.sampled_from([0.5, 2.0, 15.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.place.clock.advance(seconds)
        self.forget_expired()

    @precondition(lambda self: self.there)
    @rule(data=st.data(), at=st.integers(0, 8191), bit=st.integers(0, 7))
    def spoil(self, data: st.DataObject, at: int, bit: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.there)))
        assert self.place.tier is not None
        place = self.place.tier._ledger._table.find(fingerprint(key))
        assert place is not None
        place = self.place.tier._ledger.place(place)
        for slot, header in self.place.slots():
            here = int(slot.path.name[:8]) << 32 | slot.offset // slot.slot_bytes
            if here == place and header.key == key:
                slot.flip(at if at < 4096 else 4096 + at % length_of(key), bit)
                self.spoilt.add(key)

    @rule(ttl_s=st.sampled_from([0.0, 0.0, 20.0]))
    def reopen(self, ttl_s: float) -> None:
        self.heal()
        self.ttl_s = ttl_s
        self.open()
        # Should the journal have been given up, a spoilt header is seen at once.
        present = {key for key, here in zip(KEYS, self.driver.present(KEYS), strict=True) if here}
        self.there -= self.spoilt - present

    @rule(how=st.sampled_from(["removed", "cut", "garbage"]))
    def reopen_without_a_journal(self, how: str) -> None:
        """By the headers: what failed or has left may be found again, what was deleted never."""
        self.heal()
        # Errands and loose ends before the end of the process.
        self.place.check_books()
        self.place.close()
        path = self.place.journal
        if path.exists():
            changes: dict[str, Callable[[], object]] = {
                "removed": path.unlink,
                "cut": lambda: os.truncate(path, 9),
                "garbage": lambda: path.write_bytes(b"garbage" * 100),
            }
            changes[how]()
        self.open()
        found = {key for key, here in zip(KEYS, self.driver.present(KEYS), strict=True) if here}
        assert found >= self.there - self.spoilt
        assert not found & self.deleted, "a deleted chunk is back"
        for _, header in self.place.slots():
            if header.key in found - self.there:
                self.expires_s[header.key] = header.expires_at_us // 1_000_000
                self.doubtful.add(header.key)
        self.there = found

    @invariant()
    def contains_agrees(self) -> None:
        if hasattr(self, "place"):
            assert self.driver.present(KEYS) == [key in self.there for key in KEYS]

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "place") and not any(s.left for s in self.systems.values()):
            for path in (self.place.path / "partial").iterdir():
                path.unlink(missing_ok=True)  # a failed write may leave one until the next start
            self.place.check_books()
            assert self.place.context.metrics.value("internal_errors") == 0


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=40)
