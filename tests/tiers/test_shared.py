"""A tier on a medium that others use too: the contract, and what is its own."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwell.clock import ManualClock
from stepwell.core.identity import Identity
from stepwell.core.keys import Key, make_key, root_of
from stepwell.core.types import Chunk, ChunkResult, Direction, Lookup, Outcome, Reason
from stepwell.policy.breaker import Breaker, State
from stepwell.store import Store
from stepwell.testing import (
    Driver,
    SharedTierContract,
    buffer_of,
    key_of,
    payload_of,
    tier_machine,
)
from stepwell.tiers import shared
from stepwell.tiers.base import TierContext, believed
from stepwell.tiers.guarded import GuardedTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.media.base import Record
from stepwell.tiers.media.roots import described_roots, description_key
from stepwell.tiers.outcomes import NO_ROOM
from stepwell.tiers.shared import SharedTier

from .memory import MemoryMedium

SIZE = 4096
LONG_S = 60.0  # of a busy machine
DONE = ChunkResult(Outcome.DONE)
EXISTS = ChunkResult(Outcome.DONE, Reason.EXISTS)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
FAILED = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
KEYS = [key_of(idx) for idx in range(12)]


class TestShared(SharedTierContract):
    """Without a server between."""

    @pytest.fixture(autouse=True)
    def _stored(self) -> None:
        self.places: dict[Path, dict[Key, bytes]] = {}

    def make_medium(self) -> MemoryMedium:
        return MemoryMedium(self.places.setdefault(self.place, {}))

    def damage(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        stored = self.places[self.place]
        stored[key] = change(stored[key])

    def count(self) -> int:
        return len(self.places.get(self.place, {}))


class TestGuardedShared(TestShared):
    """Behind a breaker, as a store has it."""

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> GuardedTier:
        tier = super().make_tier(
            context, capacity_bytes, inflight_writes_bytes=inflight_writes_bytes
        )
        guarded = GuardedTier(tier, Breaker(latency_limit_s=1e6), context)
        for name in ("drain", "erase", "stats", "medium"):  # what a store asks of the tier itself
            setattr(guarded, name, getattr(tier, name))
        return guarded


_PLACES: dict[Path, dict[Key, bytes]] = {}
TestSharedMachine = tier_machine(
    lambda context, place: SharedTier(
        MemoryMedium(_PLACES.setdefault(place, {})), context, name="pool"
    ),
    persistent=True,
).TestCase


@dataclass
class Rig:
    """A tier on a medium, and a breaker between it and whoever drives it."""

    medium: MemoryMedium
    tier: SharedTier
    guard: GuardedTier
    driver: Driver
    clock: ManualClock
    context: TierContext

    def rest(self) -> None:
        """Until nothing is under way."""
        assert self.tier.drain(LONG_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    clock = ManualClock()
    context = TierContext(clock=clock)
    medium = MemoryMedium()
    tier = SharedTier(medium, context, name="pool")
    guard = GuardedTier(tier, Breaker(), context)
    yield Rig(medium, tier, guard, Driver(guard), clock, context)
    guard.close()


# Finding out.


def test_questions_go_together(rig: Rig) -> None:
    """An engine asks for one chunk after the other."""
    keys = [key_of(idx) for idx in range(300)]
    with held(rig.medium, "exist"):
        for key in keys:
            assert rig.tier.contains([key]) == [Lookup.UNKNOWN]
    rig.rest()
    asked = rig.medium.of("exist")
    assert sorted(key for call in asked for key in call) == sorted(keys)
    assert len(asked) < 20, "one for each thread, and what has come meanwhile"


def test_too_many_questions_are_misses(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAX_ASKED", 4)
    monkeypatch.setattr(shared, "_ASK_AT_ONCE", 3)
    assert rig.tier.contains(KEYS) == [Lookup.UNKNOWN] * 12
    rig.rest()
    assert rig.driver.lookup(KEYS) == [Lookup.MISS] * 12
    assert [len(call) for call in rig.medium.of("exist")] == [3, 1]


def test_believing_asks_nothing(rig: Rig) -> None:
    rig.medium.stored[KEYS[0]] = b"x"
    assert believed(rig.guard, KEYS[:2]) == [Lookup.UNKNOWN] * 2
    rig.rest()
    assert rig.medium.calls == []
    rig.driver.lookup(KEYS[:2])
    assert believed(rig.guard, KEYS[:3]) == [Lookup.HIT, Lookup.MISS, Lookup.UNKNOWN]


def test_a_question_that_fails_is_a_miss_and_the_breaker_hears_of_it(rig: Rig) -> None:
    rig.medium.broken = lambda call: call == "exist"
    for idx in range(12):
        assert rig.driver.lookup([KEYS[idx]]) == [Lookup.MISS]
        if rig.guard.available:
            assert rig.guard.why_missed(KEYS[idx]) is Reason.IO_ERROR
        rig.driver.collect()
    assert rig.guard.breaker.state is State.OPEN
    assert rig.guard.why_missed(KEYS[0]) is Reason.BREAKER
    num_asked = len(rig.medium.of("exist"))
    assert num_asked < 12
    assert rig.guard.contains([key_of("more")]) == [Lookup.MISS]
    rig.rest()
    assert len(rig.medium.of("exist")) == num_asked, "it is left alone"


def test_an_unforeseen_error_answers_too(rig: Rig) -> None:
    def fail(keys: object, within_s: float) -> list[bool]:
        raise RuntimeError("unforeseen")

    rig.medium.exist = fail  # type: ignore[method-assign, assignment]
    assert rig.driver.lookup(KEYS[:2]) == [Lookup.MISS] * 2
    rig.rest()
    assert rig.context.metrics.value("internal_errors") == 1


# Reading and writing.


def test_what_fails_fails_for_every_chunk_of_the_call(rig: Rig) -> None:
    rig.driver.write(KEYS[:2])
    rig.medium.broken = lambda call: call in ("read", "write")
    assert rig.driver.read(KEYS[:3])[0].results == (FAILED,) * 3
    assert rig.driver.write(KEYS[:4]) == (EXISTS, EXISTS, FAILED, FAILED)
    rig.medium.broken = lambda call: False
    assert rig.driver.read(KEYS[:2])[0].done
    assert rig.driver.write(KEYS[2:3]) == (DONE,)


def test_what_is_there_is_not_sent_again(rig: Rig) -> None:
    rig.driver.write(KEYS[:3])
    other = Driver(SharedTier(MemoryMedium(rig.medium.stored), rig.context, name="other"))
    assert other.write(KEYS[:4]) == (EXISTS,) * 3 + (DONE,)
    medium: MemoryMedium = other.tier.medium  # type: ignore[attr-defined]
    assert medium.of("write") == [(KEYS[3],)]
    assert other.write(KEYS[:4]) == (EXISTS,) * 4
    assert len(medium.of("exist")) == 1, "what is known is not asked for"
    other.tier.close()
    assert medium.closed


@pytest.mark.parametrize("result", [NO_ROOM, FAILED])
def test_what_was_not_written_is_not_believed_to_be_there(rig: Rig, result: ChunkResult) -> None:
    rig.medium.write = lambda records, within_s: [result] * len(records)  # type: ignore[method-assign, assignment]
    assert rig.driver.write(KEYS[:2]) == (result,) * 2
    assert rig.driver.lookup(KEYS[:2]) == [Lookup.MISS] * 2


def test_what_the_upper_tier_has_is_not_asked_for(rig: Rig, store: Store) -> None:
    host = Driver(store.tiers[0])
    host.write(KEYS[:2])
    known(store, KEYS[:4])
    assert {key for call in rig.medium.of("exist") for key in call} == set(KEYS[2:4])


def test_a_call_is_given_what_is_left_of_the_jobs_time(rig: Rig) -> None:
    rig.driver.write(KEYS[:1], deadline_s=30.0)
    rig.driver.read(KEYS[:1], deadline_s=7.0)
    assert rig.medium.within_s == [30.0, 30.0, 7.0]
    rig.driver.read(KEYS[:1], deadline_s=0.001)
    assert rig.medium.within_s[-1] == 0.25, "what began in time is not given up at once"


def test_an_expired_record_stays_until_it_is_written_anew(rig: Rig) -> None:
    """It has expired by this machine's clock, which may be an hour ahead."""
    soon_s = rig.clock.wall() + 10.0
    chunk = Chunk(KEYS[0], buffer_of(SIZE, payload_of(KEYS[0], SIZE)), 0, soon_s)
    rig.driver.wait(rig.driver.submit(Direction.WRITE, [chunk]))
    rig.clock.advance(11.0)
    (result,) = rig.driver.read(KEYS[:1])[0].results
    assert result.reason is Reason.EXPIRED
    rig.rest()
    assert KEYS[0] in rig.medium.stored
    assert rig.medium.of("remove") == []
    assert rig.driver.write(KEYS[:1]) == (DONE,)
    assert rig.medium.of("remove") == [(KEYS[0],)]
    assert rig.driver.read(KEYS[:1])[0].done


def test_a_record_in_use_is_touched_once_in_a_while(rig: Rig) -> None:
    rig.driver.write(KEYS[:2])
    for _ in range(3):
        rig.driver.read(KEYS[:2])
        rig.driver.touch(KEYS[:3])
    rig.rest()
    assert rig.medium.of("touch") == [], "what is new is recent"
    rig.clock.advance(601.0)
    rig.driver.read(KEYS[:2])  # it is not believed to be there any more, and seen to be
    for _ in range(3):
        rig.driver.touch(KEYS[:2])
    rig.rest()
    touched = [key for call in rig.medium.of("touch") for key in call]
    described = description_key(root_of(KEYS[0]))
    assert touched == [*KEYS[1::-1], described], "the first of a prefix is the most recent"


def test_what_waits_to_be_touched_has_no_description_of_descriptions(rig: Rig) -> None:
    """Two uses before the medium is told: the second took the first's description for a chunk."""
    rig.driver.write(KEYS[:2])
    rig.clock.advance(601.0)
    rig.driver.read(KEYS[:2])
    rig.rest()
    rig.medium.calls.clear()
    rig.clock.advance(601.0)
    rig.driver.lookup(KEYS[:2])
    for key in KEYS[:2]:
        assert list(rig.tier.use([key])) == [True]
    rig.tier.settle()
    described = description_key(root_of(KEYS[0]))
    assert {key for call in rig.medium.of("touch") for key in call} == {*KEYS[:2], described}


def test_a_touch_that_fails_is_tried_at_the_next_use(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is used all the time would be the oldest, and leave."""
    monkeypatch.setattr(shared, "_TOUCH_AT_ONCE", 4)
    rig.driver.write(KEYS)
    rig.clock.advance(601.0)
    rig.driver.read(KEYS)
    rig.rest()
    assert [len(call) for call in rig.medium.of("touch")] == [4, 4, 4, 1]
    rig.medium.calls.clear()
    rig.clock.advance(601.0)
    rig.medium.broken = lambda call: call == "touch" and len(rig.medium.of("touch")) == 2
    rig.driver.read(KEYS)
    rig.rest()
    assert [len(call) for call in rig.medium.of("touch")] == [4, 4], "it ends with what fails"
    rig.medium.broken = lambda call: False
    rig.medium.calls.clear()
    rig.driver.read(KEYS)
    rig.rest()
    again = {key for call in rig.medium.of("touch") for key in call}
    assert again == {*KEYS[:8], description_key(root_of(KEYS[0]))}


def test_removals_end_with_the_first_that_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs would hold a thread for as many deadlines as there are batches."""
    monkeypatch.setattr(shared, "_REMOVE_AT_ONCE", 4)
    rig.driver.write(KEYS)
    rig.medium.broken = lambda call: call == "remove"
    rig.driver.tier.delete(KEYS)
    rig.rest()
    assert [len(call) for call in rig.medium.of("remove")] == [4]
    assert rig.driver.present(KEYS) == [False] * 12
    rig.medium.broken = lambda call: False
    rig.medium.calls.clear()
    rig.clock.advance(2.0)
    rig.driver.write([key_of("another")])
    rig.rest()
    assert [len(call) for call in rig.medium.of("remove")] == [4, 4, 4]
    assert not set(KEYS) & set(rig.medium.stored)


def test_a_read_does_not_wait_for_what_it_has_removed(rig: Rig) -> None:
    """A server may answer reads and hang with removals."""
    rig.driver.write(KEYS[:2])
    rig.medium.stored[KEYS[0]] = bytes(len(rig.medium.stored[KEYS[0]]))
    let_go = threading.Event()
    real = rig.medium.remove

    def wait(keys: Sequence[Key], within_s: float) -> None:
        assert let_go.wait(LONG_S)
        real(keys, within_s)

    rig.medium.remove = wait  # type: ignore[method-assign]
    try:
        first, second = rig.driver.read(KEYS[:2])[0].results
        assert (first.reason, second) == (Reason.HEADER, DONE)
        assert rig.driver.present(KEYS[:2]) == [False, True]
        assert rig.driver.read(KEYS[:1])[0].results == (ABSENT,)
    finally:
        let_go.set()
    rig.rest()
    assert KEYS[0] not in rig.medium.stored


def test_what_is_in_the_way_is_removed_within_the_jobs_time(rig: Rig) -> None:
    rig.driver.write(KEYS[:1])
    rig.medium.broken = lambda call: call == "remove"
    rig.driver.tier.delete(KEYS[:1])
    rig.rest()
    rig.medium.within_s.clear()
    rig.driver.write(KEYS[:1], deadline_s=3.0)
    assert rig.medium.calls[-1][0] != "write"
    assert rig.medium.within_s[0] == 3.0


def test_who_waits_behind_a_question_without_an_answer_is_told_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would wait as long, one after the other."""
    monkeypatch.setattr(shared, "_ASK_AT_ONCE", 2)
    for elapsed_s, calls in ((2.0, 1), (0.0, 6)):
        rig.medium.calls.clear()

        def fail(call: str, elapsed_s: float = elapsed_s) -> bool:
            if call == "exist":
                rig.clock.advance(elapsed_s)
            return call == "exist"

        rig.medium.broken = fail
        tier = SharedTier(rig.medium, rig.context, name="other", num_threads=1)
        assert tier.contains(KEYS) == [Lookup.UNKNOWN] * 12
        assert tier.drain(LONG_S)
        assert Lookup.UNKNOWN not in tier.contains(KEYS)
        assert tier.why_missed(KEYS[11]) is Reason.IO_ERROR
        assert len(rig.medium.of("exist")) == calls
        tier.close()


@pytest.mark.parametrize("result", [NO_ROOM, FAILED])
def test_a_description_that_was_not_taken_is_offered_again(rig: Rig, result: ChunkResult) -> None:
    identity = Identity({"model": "a"})
    rig.context.registry.add(identity)
    keys = [make_key(identity.root, bytes([idx])) for idx in range(1, 4)]
    real = rig.medium.write
    refuses = True

    def write(records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        if refuses and records[0].key == description_key(identity.root):
            return [result]
        return real(records, within_s)

    rig.medium.write = write  # type: ignore[method-assign]
    rig.driver.write(keys[:1])
    rig.rest()
    assert not described_roots(rig.medium)
    refuses = False
    rig.driver.write(keys[1:2])
    rig.rest()
    assert described_roots(rig.medium) == {identity.root: identity}


def test_a_description_that_is_there_is_not_sent_again(rig: Rig) -> None:
    identity = Identity({"model": "a"})
    rig.context.registry.add(identity)
    rig.driver.write([make_key(identity.root, b"1")])
    rig.rest()
    context = TierContext(clock=rig.clock)
    context.registry.add(identity)
    medium = MemoryMedium(rig.medium.stored)
    other = Driver(SharedTier(medium, context, name="other"))
    other.write([make_key(identity.root, b"2")])
    assert other.tier.drain(LONG_S)  # type: ignore[attr-defined]
    assert medium.of("exist")[-1] == (description_key(identity.root),)
    assert len(medium.of("write")) == 1
    other.tier.close()


def test_what_waits_to_be_asked_is_not_when_the_tier_is_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that hangs holds up the end of an engine, a batch after the other."""
    monkeypatch.setattr(shared, "_ASK_AT_ONCE", 2)
    entered, let_go = threading.Event(), threading.Event()

    def wait(call: str) -> bool:
        entered.set()
        assert let_go.wait(LONG_S)
        return False

    rig.medium.broken = wait
    tier = SharedTier(rig.medium, rig.context, name="other", num_threads=1)
    tier.contains(KEYS)
    assert entered.wait(LONG_S)
    closing = threading.Thread(target=tier.close)
    closing.start()
    rig.driver.wait_until(lambda: tier.contains(KEYS[:1]) == [Lookup.MISS], "the close")
    let_go.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert len(rig.medium.of("exist")) == 1


def test_a_description_that_was_evicted_comes_back(rig: Rig) -> None:
    identity = Identity({"model": "a"})
    rig.context.registry.add(identity)
    for idx, hours in ((1, 0.0), (2, 0.1), (3, 1.0)):
        rig.clock.advance(hours * 3600.0)
        rig.driver.write([make_key(identity.root, bytes([idx]))])
        rig.rest()
        there = rig.medium.stored.pop(description_key(identity.root), None)
        assert (there is not None) == (hours != 0.1)


def test_a_removal_that_fails_is_heard_of(rig: Rig) -> None:
    rig.driver.write(KEYS[:1])
    rig.medium.broken = lambda call: call == "remove"
    assert rig.driver.tier.delete(KEYS[:1]) == 1
    assert rig.driver.present(KEYS[:1]) == [False]
    rig.rest()
    assert len(rig.tier.troubles) == 1
    rig.driver.collect()
    assert not rig.tier.troubles


# In a store.


@pytest.fixture
def store(rig: Rig) -> Iterator[Store]:
    host = HostTier(1 << 20, rig.context)
    store = Store([host, rig.guard], rig.context)
    yield store
    store.close()


def wait(store: Store, job_id: int) -> object:
    give_up_s = time.monotonic() + LONG_S
    while time.monotonic() < give_up_s:
        for result in store.poll():
            if result.job_id == job_id:
                return result
        time.sleep(0.001)
    raise AssertionError("never reported")


def chunks_of(keys: list[Key]) -> list[Chunk]:
    return [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in keys]


def known(store: Store, keys: list[Key]) -> list[Lookup]:
    give_up_s = time.monotonic() + LONG_S
    while Lookup.UNKNOWN in (answers := store.lookup(keys)):
        assert time.monotonic() < give_up_s, "no answer"
        time.sleep(0.001)
    return answers


def test_the_best_answer_counts(rig: Rig, store: Store) -> None:
    """What the host tier has is not asked of the tier below it."""
    other = Driver(SharedTier(MemoryMedium(rig.medium.stored), rig.context, name="other"))
    other.write(KEYS[4:6])
    wait(store, store.write(chunks_of(KEYS[:2])))
    assert store.lookup(KEYS[:2]) == [Lookup.HIT] * 2
    assert store.lookup([KEYS[0], KEYS[4], KEYS[7]])[1:] == [Lookup.UNKNOWN] * 2
    assert known(store, [KEYS[0], KEYS[4], KEYS[7]]) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
    asked = {key for call in rig.medium.of("exist") for key in call} - set(KEYS[:2])
    assert asked == {KEYS[4], KEYS[7]}
    other.tier.close()


def ahead(store: Store, until_known: bool) -> object:
    found = store.look_ahead(
        KEYS[:4], chunk_bytes=SIZE, chunk_tokens=16, prefill_tokens_per_s=None,
        until_known=until_known,
    )  # fmt: skip
    return found.num_hits, found.num_worth, found.unknown


def test_looking_ahead_waits_until_it_is_known(rig: Rig, store: Store) -> None:
    wait(store, store.write(chunks_of(KEYS[:1])))
    assert ahead(store, until_known=True) == (1, 0, True)
    known(store, KEYS[:4])
    assert ahead(store, until_known=True) == (1, 1, False)
    assert ahead(store, until_known=False) == (1, 1, False)


def test_looking_ahead_may_stop_waiting(rig: Rig, store: Store) -> None:
    wait(store, store.write(chunks_of(KEYS[:1])))
    assert ahead(store, until_known=False) == (1, 1, True)


def test_a_read_finds_out_for_itself(rig: Rig, store: Store) -> None:
    """And what the tier below served is kept above it."""
    other = Driver(SharedTier(MemoryMedium(rig.medium.stored), rig.context, name="other"))
    other.write(KEYS[:3])
    chunks = [Chunk(key, buffer_of(SIZE)) for key in KEYS[:4]]
    result = wait(store, store.read(chunks))
    assert result.results == (DONE,) * 3 + (ABSENT,)  # type: ignore[attr-defined]
    assert result.tiers == ("pool",) * 3 + ("",)  # type: ignore[attr-defined]
    assert store.tiers[0].contains(KEYS[:4]) == [Lookup.HIT] * 3 + [Lookup.MISS]
    other.tier.close()


def test_several_readers_of_a_chunk_fetch_it_once(rig: Rig, store: Store) -> None:
    other = Driver(SharedTier(MemoryMedium(rig.medium.stored), rig.context, name="other"))
    other.write(KEYS[:1])
    readers = [[Chunk(KEYS[0], buffer_of(SIZE))] for _ in range(5)]
    with held(rig.medium, "read"):
        jobs = [store.read(chunks) for chunks in readers]
    ended = store.drain(LONG_S)
    assert sorted(result.job_id for result in ended) == jobs
    assert all(result.done for result in ended)
    assert {bytes(chunks[0].buffer) for chunks in readers} == {payload_of(KEYS[0], SIZE)}
    assert rig.medium.of("read") == [(KEYS[0],)]
    other.tier.close()


# Histories in which something that was gone was believed to be there.


@contextlib.contextmanager
def held(medium: MemoryMedium, call: str) -> Iterator[threading.Event]:
    """Within it a kind of call has begun and does not end; gives an event of its begin."""
    begun, released = threading.Event(), threading.Event()
    real = getattr(medium, call)

    def wait(*args: object) -> object:
        begun.set()
        released.wait(LONG_S)
        return real(*args)

    setattr(medium, call, wait)
    try:
        yield begun
    finally:
        setattr(medium, call, real)
        released.set()


def test_a_chunk_deleted_while_it_is_read(rig: Rig) -> None:
    """The read ended after the removal, and said that it was there; the next write was lost."""
    rig.driver.write(KEYS[:1])
    real = rig.medium.read
    read = threading.Event()

    def and_then(*args: object) -> object:
        found = real(*args)  # type: ignore[arg-type]
        read.set()
        released.wait(LONG_S)
        return found

    released = threading.Event()
    rig.medium.read = and_then  # type: ignore[method-assign, assignment]
    job_id = rig.driver.submit(Direction.READ, [Chunk(KEYS[0], buffer_of(SIZE))])
    assert read.wait(LONG_S)
    rig.clock.advance(0.1)
    assert rig.driver.tier.delete(KEYS[:1]) == 1
    rig.driver.wait_until(lambda: KEYS[0] not in rig.medium.stored, "the removal")
    rig.driver.wait_until(lambda: rig.tier.believes(KEYS[:1]) == [Lookup.MISS], "its end")
    rig.medium.read = real  # type: ignore[method-assign]
    released.set()
    rig.driver.wait(job_id)
    assert rig.driver.present(KEYS[:1]) == [False]
    assert rig.driver.write(KEYS[:1]) == (DONE,)
    assert KEYS[0] in rig.medium.stored


def test_a_removal_that_takes_long(rig: Rig) -> None:
    """It was asked for meanwhile, was there still, and was believed to be for a minute."""
    rig.driver.write(KEYS[:2])
    with held(rig.medium, "remove") as begun:
        rig.driver.tier.delete(KEYS[:1])
        assert begun.wait(LONG_S)
        for _ in range(4):
            rig.clock.advance(1.0)
            assert rig.driver.tier.contains(KEYS[:1]) == [Lookup.MISS]
        assert rig.driver.read(KEYS[:2])[0].results == (ABSENT, DONE)
        refused = ChunkResult(Outcome.FULL, Reason.DEADLINE)
        assert rig.driver.write(KEYS[:2], deadline_s=0.1) == (refused, EXISTS)
    rig.rest()
    assert KEYS[0] not in rig.medium.stored
    assert rig.driver.present(KEYS[:1]) == [False]
    assert rig.driver.write(KEYS[:1]) == (DONE,)


def test_a_belief_is_not_renewed_by_itself(rig: Rig) -> None:
    """What was written once a minute was believed for ever after the server had lost it."""
    rig.driver.write(KEYS[:1])
    rig.medium.stored.clear()
    outcomes = []
    for _ in range(3):
        rig.clock.advance(30.0)
        outcomes += rig.driver.write(KEYS[:1])
    assert DONE in outcomes
    assert KEYS[0] in rig.medium.stored


def test_what_could_not_be_removed_is_removed_later(rig: Rig) -> None:
    """It was served again, half a second after it had been deleted."""
    rig.driver.write(KEYS[:2])
    rig.medium.broken = lambda call: call == "remove"
    rig.driver.tier.delete(KEYS[:1])
    rig.rest()
    for _ in range(5):
        rig.clock.advance(1.0)
        assert rig.driver.present(KEYS[:2]) == [False, True]
        assert rig.driver.read(KEYS[:1])[0].results == (ABSENT,)
        rig.rest()
    rig.medium.broken = lambda call: False
    rig.clock.advance(1.0)
    rig.driver.read(KEYS[1:2])
    rig.rest()
    assert KEYS[0] not in rig.medium.stored
    assert not rig.tier._presence.has_removals


def test_a_wrong_record_that_is_written_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write found it there, said so, and then it was removed."""
    rig.driver.write(KEYS[:1])
    rig.medium.stored[KEYS[0]] = b"\xff" * 8192
    other = Driver(SharedTier(rig.medium, rig.context, name="other"))
    real, waits = rig.tier._presence.begin_writes, threading.Event()

    def begin_writes(keys: Sequence[Key], within_s: float) -> list[bool]:
        waits.set()
        return real(keys, within_s)

    monkeypatch.setattr(rig.tier._presence, "begin_writes", begin_writes)
    with held(rig.medium, "remove") as begun:
        job_id = rig.driver.submit(Direction.READ, [Chunk(KEYS[0], buffer_of(SIZE))])
        assert begun.wait(LONG_S)
        write = rig.driver.submit(Direction.WRITE, chunks_of(KEYS[:1]))
        assert waits.wait(LONG_S)
        rig.driver.collect()
    assert rig.driver.wait(job_id).results[0].reason is Reason.HEADER
    assert rig.driver.wait(write).results == (DONE,)
    assert rig.driver.read(KEYS[:1])[0].done
    other.tier.close()


def test_after_its_end_nobody_is_asked(rig: Rig) -> None:
    """`contains` and `delete` went on to the server, on the caller's thread."""
    rig.driver.write(KEYS[:1])
    rig.guard.close()
    num_calls = len(rig.medium.calls)
    assert rig.tier.contains(KEYS) == [Lookup.MISS] * 12
    assert rig.tier.delete(KEYS) == 0
    assert len(rig.medium.calls) == num_calls


def test_deletions_in_a_row_are_one_errand(rig: Rig) -> None:
    with held(rig.medium, "remove"):
        for idx in range(2000):
            rig.tier.delete([key_of(f"d{idx}")])
        assert len(rig.tier._runner._errands) < 10
    rig.rest()
    assert {key for call in rig.medium.of("remove") for key in call} == {
        key_of(f"d{idx}") for idx in range(2000)
    }


def test_an_answer_of_the_wrong_length(rig: Rig) -> None:
    """Whoever asked waited for ever."""
    rig.medium.exist = lambda keys, within_s: [True]  # type: ignore[method-assign, assignment]
    assert rig.driver.lookup(KEYS[:3]) == [Lookup.MISS] * 3
    rig.rest()
    assert rig.context.metrics.value("internal_errors") == 1


def test_what_was_not_asked_for_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAX_ASKED", 1)
    rig.tier.contains(KEYS[:3])
    assert rig.tier.why_missed(KEYS[2]) is Reason.QUEUE_FULL


# The breaker.


def test_answers_that_move_nothing_are_answers(rig: Rig) -> None:
    """One failed question every few minutes opened it, with all others answered between."""
    rig.driver.write(KEYS[:1])
    for idx in range(12):
        rig.medium.broken = lambda call: call == "exist"
        rig.driver.lookup([key_of(f"q{idx}")])
        rig.driver.collect()
        rig.medium.broken = lambda call: False
        assert rig.driver.write(KEYS[:1]) == (EXISTS,)
        assert rig.driver.read([key_of("none")])[0].results == (ABSENT,)
        rig.clock.advance(70.0)
    assert rig.guard.breaker.state is State.CLOSED


def opened(rig: Rig) -> None:
    rig.medium.broken = lambda call: True
    for idx in range(5):
        rig.driver.read([key_of(f"o{idx}")])
    assert rig.guard.breaker.state is State.OPEN


def test_an_answer_that_moves_nothing_closes_it_again(rig: Rig) -> None:
    opened(rig)
    rig.medium.broken = lambda call: False
    rig.clock.advance(6.0)
    rig.driver.read([key_of("none")])
    assert rig.guard.breaker.state is State.CLOSED


def test_lookups_alone_do_not_try_an_open_one(rig: Rig) -> None:
    """Each waited as long as a hanging server makes it, while nothing else came."""
    opened(rig)
    num_asked = len(rig.medium.of("exist"))
    rig.clock.advance(60.0)
    assert rig.guard.available
    assert rig.guard.contains(KEYS) == [Lookup.MISS] * 12
    assert rig.guard.why_missed(KEYS[0]) is Reason.BREAKER
    rig.rest()
    assert len(rig.medium.of("exist")) == num_asked


def test_what_is_not_asked_is_missed_for_the_breaker(rig: Rig, store: Store) -> None:
    wait(store, store.write(chunks_of(KEYS[:1])))
    store.tiers[0].delete(KEYS[:1])
    rig.medium.broken = lambda call: True
    reasons = set()
    for _ in range(8):
        result = wait(store, store.read([Chunk(KEYS[0], buffer_of(SIZE))]))
        reasons.add(result.results[0].reason)  # type: ignore[attr-defined]
    assert rig.guard.breaker.state is State.OPEN
    assert reasons == {Reason.IO_ERROR, Reason.BREAKER}
