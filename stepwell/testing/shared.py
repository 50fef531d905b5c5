"""The contract of a tier on a medium that others use too, over the contract of every tier."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stepwell.clock import ManualClock
from stepwell.core.identity import Identity
from stepwell.core.keys import Key, make_key, root_of
from stepwell.core.record import HEADER_BYTES, Header, payload_checksum
from stepwell.core.types import Chunk, ChunkResult, Direction, Lookup, Outcome, Reason
from stepwell.testing.contract import TierContract, keys_of
from stepwell.testing.driving import Driver, buffer_of, key_of, payload_of
from stepwell.tiers.base import Tier, TierContext
from stepwell.tiers.media.base import Medium, Record, Wanted
from stepwell.tiers.media.roots import described_roots, description_key
from stepwell.tiers.shared import SharedTier

__all__ = ["SharedTierContract"]

SIZE = 4096
DONE = ChunkResult(Outcome.DONE)
EXISTS = ChunkResult(Outcome.DONE, Reason.EXISTS)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)


class _Gated:
    """A medium whose calls wait while the gate is shut."""

    def __init__(self, medium: Medium, gate: threading.Event) -> None:
        self.medium = medium
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.medium, name)
        if name not in ("exist", "read", "write"):
            return found

        def call(*args: Any) -> Any:
            self._gate.wait(30)
            return found(*args)

        return call


def _flipped(offset: int) -> Callable[[bytes], bytes]:
    """Changes one bit."""
    return lambda stored: stored[:offset] + bytes([stored[offset] ^ 1]) + stored[offset + 1 :]


def _renamed(key: Key) -> Callable[[bytes], bytes]:
    """A whole record of another key."""

    def change(stored: bytes) -> bytes:
        payload = stored[HEADER_BYTES : HEADER_BYTES + SIZE]
        return Header(key, SIZE, payload_checksum(payload), 1).pack() + stored[HEADER_BYTES:]

    return change


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], Reason]] = {
    "payload": (_flipped(HEADER_BYTES + 77), Reason.CHECKSUM),
    "last byte": (_flipped(HEADER_BYTES + SIZE - 1), Reason.CHECKSUM),
    "header": (_flipped(40), Reason.HEADER),
    "magic": (_flipped(0), Reason.HEADER),
    "another record": (_renamed(key_of("another")), Reason.IDENTITY),
    "payload cut": (lambda stored: stored[: HEADER_BYTES + SIZE - 512], Reason.TRUNCATED),
    "header only": (lambda stored: stored[:HEADER_BYTES], Reason.TRUNCATED),
    "header cut": (lambda stored: stored[:512], Reason.TRUNCATED),
    "nothing left": (lambda stored: b"", Reason.TRUNCATED),
    "zeros": (lambda stored: bytes(len(stored)), Reason.HEADER),
}


class SharedTierContract(TierContract):
    """What must hold for a `stepwell.tiers.shared.SharedTier` on a kind of medium.

    A subclass gives:

    - `make_medium`: may use ``self.place`` to keep one test's records from another's;
    - `damage`: changes what is stored under a key behind the medium's back;
    - `count`: how many records there are.
    """

    persistent = True

    def make_medium(self) -> Medium:
        """A medium at this test's place; several of them see the same records."""
        raise NotImplementedError

    def damage(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        """Change the record of a key: bytes of header and payload, without padding."""
        raise NotImplementedError

    def count(self) -> int:
        """How many records there are at this test's place."""
        raise NotImplementedError

    # What the contract of every tier asks for.

    def make_clock(self) -> ManualClock:
        """The present time, since a server has a clock of its own."""
        return ManualClock(time.time())

    @pytest.fixture(autouse=True)
    def _open_gate(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> SharedTier:
        """A tier; how much room there is is not its own affair."""
        medium: Any = _Gated(self.make_medium(), self.gate)
        return SharedTier(medium, context, name="pool", inflight_writes_bytes=inflight_writes_bytes)

    def used_bytes(self, tier: Tier) -> int:
        """Counted in records, all of the same size."""
        return self.count() * self.size_of(SIZE)

    def size_of(self, payload_bytes: int) -> int:
        """Of a record."""
        return HEADER_BYTES + payload_bytes

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """The medium keeps silent."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def another(self, *identities: Identity) -> Driver:
        """A second engine's tier on the same medium."""
        context = TierContext(clock=self.clock)
        for identity in identities:
            context.registry.add(identity)
        tier = self.make_tier(context, 0)
        self._opened.append(tier)
        return Driver(tier)

    # Sharing.

    def test_what_one_wrote_another_reads_at_once(self) -> None:
        one, other = self.open(), self.another()
        keys = keys_of(20)
        one.write(keys)
        assert other.present(keys) == [True] * 20
        result, contents = other.read(keys)
        assert result.done
        assert contents == [payload_of(key, SIZE) for key in keys]
        assert other.write(keys) == (EXISTS,) * 20

    def test_an_earlier_miss_is_soon_forgotten(self) -> None:
        """Another engine may write at any time."""
        one, other = self.open(), self.another()
        keys = keys_of(2)
        assert other.present(keys) == [False, False]
        one.write(keys)
        self.clock.advance(1.0)
        assert other.present(keys) == [True, True]

    def test_an_answer_waits_for_whoever_asked(self) -> None:
        """An engine comes back at its next step, which may take seconds."""
        driver = self.open()
        keys = keys_of(3)
        driver.write(keys[:1])
        fresh = self.another()
        assert fresh.tier.contains(keys) == [Lookup.UNKNOWN] * 3
        fresh.wait_until(lambda: fresh.tier.drain(1.0), "the answer")  # type: ignore[attr-defined]
        self.clock.advance(20.0)
        assert fresh.tier.contains(keys) == [Lookup.HIT, Lookup.MISS, Lookup.MISS]

    def test_asking_does_not_wait(self) -> None:
        driver = self.open()
        keys = keys_of(2000)
        with self.stalled():  # whoever waited for the medium would have an answer in the end
            for _ in range(3):
                assert driver.tier.contains(keys) == [Lookup.UNKNOWN] * 2000
        assert driver.lookup(keys) == [Lookup.MISS] * 2000

    def test_what_another_deleted_is_a_miss(self) -> None:
        one, other = self.open(), self.another()
        keys = keys_of(3)
        one.write(keys)
        assert other.present(keys) == [True] * 3
        one.tier.delete(keys[:1])
        one.tier.drain(10.0)  # type: ignore[attr-defined]
        assert other.read(keys)[0].results == (ABSENT, DONE, DONE)
        assert other.present(keys) == [False, True, True]
        assert other.write(keys) == (DONE, EXISTS, EXISTS)
        self.clock.advance(1.0)
        assert one.read(keys)[0].done

    def test_two_write_the_same_chunk_at_once(self) -> None:
        """One of the two is stored, and either is as good."""
        one, other = self.open(), self.another()
        keys = keys_of(40)
        jobs = []
        for driver in (one, other):
            data = {key: payload_of(key, SIZE) for key in keys}
            jobs.append((driver, driver.submit(Direction.WRITE, driver.write_chunks(data))))
        for driver, job_id in jobs:
            assert driver.wait(job_id).done
        assert self.count() == 40
        assert one.read(keys)[1] == other.read(keys)[1] == [payload_of(k, SIZE) for k in keys]

    def test_a_medium_does_not_write_over_what_is_there(self) -> None:
        """Who comes second is told so; what is there stays, whatever it is."""
        medium = self.make_medium()
        key = key_of("twice")
        pages = [bytes([number]) * HEADER_BYTES for number in (1, 2)]
        records = [Record(key, page, memoryview(payload_of(key, SIZE)), 0.0) for page in pages]
        assert medium.write(records[:1], 30.0) == [DONE]
        assert medium.write(records[1:], 30.0) == [EXISTS]
        (found,) = medium.read([Wanted(key, buffer_of(SIZE))], 30.0)
        assert found == pages[0]
        assert self.count() == 1
        medium.close()

    # What is wrong.

    @pytest.mark.parametrize("kind", DAMAGE)
    def test_a_damaged_record_is_a_miss_and_removed(self, kind: str) -> None:
        change, reason = DAMAGE[kind]
        driver = self.open()
        keys = keys_of(3)
        driver.write(keys)
        self.damage(keys[1], change)
        result, contents = driver.read(keys)
        assert result.results == (DONE, ChunkResult(Outcome.MISS, reason), DONE)
        assert contents[::2] == [payload_of(key, SIZE) for key in keys[::2]]
        assert self.value(driver, "quarantined_chunks", reason=reason) == 1
        driver.tier.drain(10.0)  # type: ignore[attr-defined]
        assert driver.present(keys) == [True, False, True]
        assert self.count() == 2
        assert driver.write(keys) == (EXISTS, DONE, EXISTS)
        assert driver.read(keys)[0].done

    def test_what_was_damaged_on_its_way_is_read_again(self) -> None:
        """A wrong byte in this machine's memory must not empty a pool for all."""
        driver = self.open()
        keys = keys_of(2)
        driver.write(keys)
        gated: Any = driver.tier.medium  # type: ignore[attr-defined]
        real = gated.medium.read
        calls = []

        def once_wrong(wanted: Any, within_s: float) -> Any:
            found = real(wanted, within_s)
            calls.append(len(wanted))
            if len(calls) == 1:
                wanted[0].payload[5] ^= 1
            return found

        gated.medium.read = once_wrong
        result, contents = driver.read(keys)
        assert result.done
        assert contents == [payload_of(key, SIZE) for key in keys]
        assert calls == [2, 1]
        assert self.value(driver, "quarantined_chunks") == 0
        assert self.count() == 2

    # Life.

    def test_erase_removes_a_root_and_no_other(self) -> None:
        driver = self.open()
        one = [key_of(idx, "one") for idx in range(30)]
        two = [key_of(idx, "two") for idx in range(3)]
        driver.write(one)
        driver.write(two)
        assert driver.tier.erase(root_of(one[0])) == 30  # type: ignore[attr-defined]
        fresh = self.another()
        assert fresh.present([*one, *two]) == [False] * 30 + [True] * 3
        assert driver.tier.erase(root_of(one[0])) == 0  # type: ignore[attr-defined]

    def test_the_keys_of_a_root_are_listed(self) -> None:
        """By whoever can, each at least once."""
        driver = self.open()
        one = [key_of(idx, "one") for idx in range(30)]
        driver.write(one)
        driver.write([key_of("x", "two")])
        medium = driver.tier.medium  # type: ignore[attr-defined]
        listed = medium.keys(root_of(one[0]))
        assert listed is None or set(listed) == set(one)
        nothing = medium.keys(root_of(key_of("x", "three")))
        assert nothing is None or list(nothing) == []

    def test_a_root_is_described_once(self) -> None:
        """For people, by whoever writes first; erasing a root takes it along."""
        identity = Identity({"model": "a"}, {"name": "A"})
        driver, other = self.another(identity), self.another(identity)
        medium = driver.tier.medium  # type: ignore[attr-defined]
        keys = [make_key(identity.root, bytes([idx])) for idx in range(3)]
        assert not described_roots(medium)
        for each in (driver, other):
            each.write(keys[:2])
            each.write(keys[2:])
            each.tier.drain(10.0)  # type: ignore[attr-defined]
        assert medium.exist([description_key(identity.root)], 10.0) == [True]
        assert self.count() == 4
        found = described_roots(medium)
        assert found is None or found == {identity.root: identity}
        assert driver.tier.erase(identity.root) == 3  # type: ignore[attr-defined]
        assert self.count() == 0
        assert not described_roots(medium)
        driver.write([make_key(identity.root, b"new")])
        driver.tier.drain(10.0)  # type: ignore[attr-defined]
        assert self.count() == 2, "it is described anew"

    def test_an_expired_chunk_is_a_miss_and_can_be_written_anew(self) -> None:
        driver = self.open()
        keys = keys_of(2)
        soon_s = self.clock.wall() + 3600.0
        chunks = [
            Chunk(key, buffer_of(SIZE, payload_of(key, SIZE)), 0, soon_s * idx)
            for idx, key in enumerate(keys)
        ]
        driver.wait(driver.submit(Direction.WRITE, chunks))
        result, _ = driver.read(keys)
        assert [each.expires_at_s for each in result.results] == [0.0, pytest.approx(soon_s)]
        self.clock.advance(3601.0)
        expired = ChunkResult(Outcome.MISS, Reason.EXPIRED)
        assert driver.read(keys)[0].results in ((DONE, expired), (DONE, ABSENT))
        assert driver.write(keys) == (EXISTS, DONE)
        assert driver.read(keys)[0].done

    def test_stats_are_those_of_the_medium(self) -> None:
        driver = self.open()
        driver.write(keys_of(5))
        stats = driver.tier.stats()  # type: ignore[attr-defined]
        assert stats.num_chunks in (None, 5)
        assert stats.used_bytes is None or stats.used_bytes >= 5 * SIZE
