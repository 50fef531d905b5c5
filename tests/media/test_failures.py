"""What a caller sees of every kind of server that is killed, hangs, comes back empty, or lies.

The rows of docs/FAILURES.md are printed by these tests: `scripts/failures` writes the page.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    JobResult,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.settings import Settings
from stepwell.store import Store
from stepwell.testing import buffer_of, key_of, payload_of

from .sites import SITES, Site
from .test_fs import until

SIZE = 64 << 10
DEADLINE_S = 1.0
# Of a busy machine, on top of what is promised: nothing here depends on how fast it is.
GRACE_S = 15.0
# Of what is no subject of these tests, such as what they begin with.
LONG_S = 30.0
KEYS = [key_of(idx) for idx in range(16)]
# Three open the breaker. Another is a probe if the caller is away for 5 s then, one more if it is
# for 10 s after that, and a last one for 20 s.
MOST_ASKED = 6


@dataclass
class Caller:
    """An engine's view of a store on a site, and how long it has waited at most."""

    store: Store
    longest_s: float = 0.0
    served: int = 0
    healed_s: float | None = None
    held: list[list[Chunk]] = field(default_factory=list)

    def lookup(self, keys: list[Key]) -> list[Lookup]:
        """As an engine asks: again at every step, and not for ever."""
        began_s = time.monotonic()
        while True:
            call_s = time.monotonic()
            answers = self.store.lookup(keys)
            assert time.monotonic() - call_s < GRACE_S, "a lookup waited"
            waited_s = time.monotonic() - began_s
            if Lookup.UNKNOWN not in answers or waited_s > DEADLINE_S:
                self.longest_s = max(self.longest_s, waited_s)
                return [Lookup.MISS if each is Lookup.UNKNOWN else each for each in answers]
            self.store.poll()
            time.sleep(0.005)

    def read(self, keys: list[Key]) -> JobResult:
        """Read, and check every byte that was served."""
        chunks = [Chunk(key, buffer_of(SIZE)) for key in keys]
        result = self._wait(self.store.read(chunks, DEADLINE_S), chunks, Direction.READ)
        for chunk, each in zip(chunks, result.results, strict=True):
            if each.outcome is Outcome.DONE:
                assert bytes(chunk.buffer) == payload_of(chunk.key, SIZE), "a wrong byte"
                self.served += 1
        return result

    def write(self, keys: list[Key], within_s: float = DEADLINE_S) -> JobResult:
        """Write, and wait."""
        chunks = [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in keys]
        return self._wait(self.store.write(chunks, within_s), chunks, Direction.WRITE)

    def _wait(self, job_id: int, chunks: list[Chunk], direction: Direction) -> JobResult:
        began_s = time.monotonic()
        while True:
            for result in self.store.poll():
                if result.job_id == job_id:
                    self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                    return result
            if job_id in self.store.overdue():
                # A system call does not return. An engine computes, and leaves the buffers alone.
                self.held.append(chunks)
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                given_up = (ChunkResult(Outcome.FAILED, Reason.DEADLINE),) * len(chunks)
                return JobResult(job_id, direction, given_up, 0, 0.0, ("",) * len(chunks))
            assert time.monotonic() - began_s < 60.0, "never reported"
            time.sleep(0.002)

    def prepare(self) -> None:
        """Have KEYS stored and known to be there. What that takes is of no row."""
        until(lambda: self.write(KEYS, LONG_S).done and self.read(KEYS).done)
        self.longest_s, self.served = 0.0, 0

    def until_read(self, keys: list[Key]) -> None:
        """Where all is well. On a busy machine one read is late, and another is not."""
        until(lambda: self.read(keys).done)

    def until_written_anew(self, keys: list[Key]) -> None:
        """The same of a write, and of what it wrote."""
        until(lambda: self.write(keys).done)
        self.until_read(keys)

    def until_gone(self, keys: list[Key]) -> None:
        """A server has lost them: they are missed, and it is known that they are not there."""
        absent, misses = {Reason.ABSENT}, [Lookup.MISS] * len(keys)
        until(lambda: reasons_of(self.read(keys)) == absent and self.lookup(keys) == misses)

    def num_asked(self) -> int:
        """How many reads a server that fails is asked for, until one is refused."""
        for count in range(20):
            result = self.read(KEYS[:4])
            assert not result.done
            if not reasons_of(result) & {Reason.IO_ERROR, Reason.DEADLINE}:
                # Absent: while the breaker is open no tier is asked, and none has it.
                assert reasons_of(result) <= {Reason.BREAKER, Reason.ABSENT}
                return count
        raise AssertionError("it is asked again and again")

    def until_left_alone(self) -> None:
        """Until what is there is missed for the breaker's sake; a probe may be due before."""

        def left_alone() -> bool:
            assert not self.read(KEYS[:4]).done
            missed = self.lookup(KEYS) == [Lookup.MISS] * 16
            return missed and self.store.why_missed(KEYS[0]) is Reason.BREAKER

        until(left_alone)

    def until_healed(self, keys: list[Key]) -> None:
        """Go on as an engine does until a write and a read are done."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < 300.0:
            self.lookup(keys)
            if self.write(keys).done and self.read(keys).done:
                self.healed_s = time.monotonic() - began_s
                return
            time.sleep(0.05)
        raise AssertionError("the tier does not heal")


def reasons_of(result: JobResult) -> set[Reason]:
    return {each.reason for each in result.results}


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    site = SITES[request.param](tmp_path)
    try:
        site.start_empty()
        yield site
    finally:
        site.close()


@pytest.fixture
def caller(site: Site) -> Iterator[Caller]:
    store = open_store(site)
    yield Caller(store)
    store.close()


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, caller: Caller) -> Iterator[None]:
    """The test's row of docs/FAILURES.md, where somebody wants them."""
    yield
    where = os.environ.get("STEPWELL_FAILURES")
    if where:
        kind = request.node.callspec.params["site"]
        case = request.node.name.partition("[")[0].removeprefix("test_").replace("_", " ")
        how = [value for name, value in request.node.callspec.params.items() if name == "damage"]
        entry = {
            "kind": kind,
            "case": ": ".join([case, *how]),
            "longest_s": caller.longest_s,
            "served": caller.served,
            "healed_s": caller.healed_s,
        }
        with open(where, "a") as file:
            file.write(json.dumps(entry) + "\n")


def open_store(site: Site, deadline_s: float = DEADLINE_S) -> Store:
    within = f"{deadline_s:.0f}s"
    return Store.open(
        Settings.parse({"url": site.url, "slow_after": within, "read_deadline": within})
    )


def within_bounds(caller: Caller) -> None:
    assert caller.longest_s < DEADLINE_S + GRACE_S


def test_killed(site: Site, caller: Caller) -> None:
    caller.prepare()
    site.kill()
    assert caller.num_asked() <= MOST_ASKED
    caller.until_left_alone()
    assert not caller.write([key_of("new")]).done
    within_bounds(caller)
    site.start()
    caller.until_healed([key_of("after")])


def test_killed_before_it_was_asked(site: Site, caller: Caller) -> None:
    """Nothing is believed yet, so the question itself fails."""
    caller.prepare()
    fresh = Caller(open_store(site))
    try:
        site.kill()
        assert fresh.lookup(KEYS) == [Lookup.MISS] * 16
        # A lookup that has no answer in time is a miss without a reason; it is said soon after.
        until(lambda: fresh.store.lookup(KEYS[:1]) == [Lookup.MISS])
        assert fresh.store.why_missed(KEYS[0]) in (Reason.IO_ERROR, Reason.BREAKER)
        within_bounds(fresh)
        caller.longest_s = fresh.longest_s
    finally:
        fresh.store.close()


def test_down_when_an_engine_starts(site: Site, caller: Caller) -> None:
    """The engine starts all the same, and uses the server once it is there."""
    site.kill()
    began_s = time.monotonic()
    fresh = Caller(open_store(site))
    try:
        assert time.monotonic() - began_s < 2 * DEADLINE_S + GRACE_S
        assert fresh.lookup(KEYS[:2]) == [Lookup.MISS] * 2
        within_bounds(fresh)
        site.start()
        fresh.until_healed(KEYS[:2])
        caller.longest_s, caller.served = fresh.longest_s, fresh.served
        caller.healed_s = fresh.healed_s
    finally:
        fresh.store.close()


def test_hangs(site: Site, caller: Caller) -> None:
    """It is asked a few times, and then left alone for a while."""
    caller.prepare()
    site.pause()
    assert caller.num_asked() <= MOST_ASKED
    caller.until_left_alone()
    within_bounds(caller)
    site.resume()
    caller.until_healed([key_of("after")])
    caller.until_read(KEYS)


def test_comes_back_empty(site: Site, caller: Caller) -> None:
    """What is believed to be there is not: a miss, and then it is known."""
    caller.prepare()
    assert caller.lookup(KEYS) == [Lookup.HIT] * 16
    site.kill()
    site.start_empty()
    caller.until_healed([key_of("after")])
    caller.until_gone(KEYS)
    caller.until_written_anew(KEYS)
    within_bounds(caller)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], Reason]] = {
    "bytes changed": (lambda stored: stored[:-100] + bytes(100), Reason.CHECKSUM),
    "header changed": (lambda stored: b"\xff" + stored[1:], Reason.HEADER),
    "half of it": (lambda stored: stored[: len(stored) // 2], Reason.TRUNCATED),
    "no payload": (lambda stored: stored[:HEADER_BYTES], Reason.TRUNCATED),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_answers_wrongly(site: Site, caller: Caller, damage: str) -> None:
    change, reason = DAMAGE[damage]
    caller.prepare()
    site.change(KEYS[3], change)
    patient = Caller(open_store(site, LONG_S))  # a wrong record is met once
    try:
        result = patient.read(KEYS)
        assert [each.reason for each in result.results] == [
            reason if idx == 3 else Reason.NONE for idx in range(16)
        ]
        assert patient.lookup([KEYS[3]]) == [Lookup.MISS]
        patient.until_written_anew(KEYS)
        within_bounds(patient)
        caller.longest_s, caller.served = patient.longest_s, patient.served
    finally:
        patient.store.close()
