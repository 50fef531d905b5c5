"""The books of a request: what was asked is what was served and what was missed, always."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.clock import ManualClock
from stepwell.core.leases import LeaseTable
from stepwell.core.types import Lookup, Reason
from stepwell.engines.books import RequestBooks
from stepwell.metrics import Metrics
from stepwell.testing import key_of

FINAL = [Reason.CHECKSUM, Reason.DEADLINE, Reason.NOT_WORTH, Reason.BREAKER, Reason.VANISHED]
REASONS = [Reason.ABSENT, *FINAL]


def count(books: RequestBooks[str], **chunk_tokens: int) -> Metrics:
    metrics = Metrics()
    books.count(metrics, chunk_tokens)
    return metrics


def series(metrics: Metrics, name: str) -> dict[tuple[str, ...], int]:
    return {labels: value for (each, labels), value in metrics.snapshot().items() if each == name}


# One chunk.


def test_an_absent_chunk_may_be_asked_for_again() -> None:
    """It may have been written meanwhile."""
    books = RequestBooks[str]()
    assert books.may_ask("a")
    books.miss("a", Reason.ABSENT)
    assert books.may_ask("a")
    books.hit("a")
    assert (books.misses, books.unread) == ({}, {"a"})


@pytest.mark.parametrize("reason", FINAL)
def test_a_chunk_that_could_not_be_read_is_not_tried_again(reason: Reason) -> None:
    """Or a request would go round in circles for ever: a hit, a read that fails, a hit, ..."""
    books = RequestBooks[str]()
    books.hit("a")
    books.miss("a", reason)
    assert not books.may_ask("a")
    assert (books.misses, books.unread) == ({"a": reason}, set())


@pytest.mark.parametrize("reason", FINAL)
def test_why_a_chunk_was_missed_does_not_turn_into_absent(reason: Reason) -> None:
    """A chunk whose read had failed was looked up again, and the reason that counts was lost."""
    books = RequestBooks[str]()
    books.miss("a", reason)
    books.miss("a", Reason.ABSENT)
    assert books.misses == {"a": reason}
    books.hit("a")
    assert (books.misses, books.unread) == ({"a": reason}, set())
    assert not books.may_ask("a")


def test_what_was_served_stays_served() -> None:
    """A late miss of a chunk that was read already, by another job or before, takes nothing."""
    books = RequestBooks[str]()
    books.hit("a")
    books.serve("a", "disk")
    books.miss("a", Reason.DEADLINE)
    books.hit("a")
    assert (books.served, books.misses, books.unread) == ({"a": "disk"}, {}, set())


def test_a_read_that_ends_after_it_was_given_up_has_not_served() -> None:
    """The engine has computed the chunk meanwhile."""
    books = RequestBooks[str]()
    books.hit("a")
    books.miss("a", Reason.DEADLINE)
    books.serve("a", "disk")
    assert (books.served, books.misses, books.unread) == ({}, {"a": Reason.DEADLINE}, set())


def test_leases_are_given_back_once() -> None:
    table = LeaseTable(ManualClock().monotonic)
    key = key_of("a")
    books = RequestBooks[str](leases=[table.acquire([key], 60.0) for _ in range(2)])
    books.give_back_leases()
    assert not table.held(key)
    books.give_back_leases()
    assert books.leases == []


# Counting.


def test_what_is_counted() -> None:
    books = RequestBooks[str]()
    for key in "abcdef":
        books.hit(key)
    books.serve("a", "host")
    books.serve("b", "disk")
    books.serve("c", "disk")
    books.miss("d", Reason.CHECKSUM)
    books.miss("g", Reason.ABSENT)
    books.miss("h", Reason.ABSENT)
    metrics = count(books, a=10, b=10, c=4, d=10, e=10, g=10, h=2)
    assert series(metrics, "lookups") == {
        ("hit", ""): 3,
        ("miss", "checksum"): 1,
        ("miss", "unread"): 2,
        ("miss", "absent"): 2,
    }
    assert series(metrics, "served_tokens") == {("host",): 10, ("disk",): 14}
    assert series(metrics, "missed_tokens") == {("checksum",): 10, ("unread",): 10, ("absent",): 12}
    assert metrics.value("asked_tokens") == 56


def test_a_chunk_of_another_group_is_no_token() -> None:
    """Of a hybrid model several chunks stand for the same tokens; one of them counts those."""
    books = RequestBooks[str]()
    books.serve("full", "disk")
    books.serve("window", "disk")
    books.miss("full 2", Reason.ABSENT)
    metrics = count(books, full=16, window=0)
    assert metrics.value("lookups") == 3
    assert metrics.value("asked_tokens") == metrics.value("served_tokens") == 16
    assert series(metrics, "missed_tokens") == {}, "nothing is not counted as something"


def test_a_request_that_asked_nothing_counts_nothing() -> None:
    assert count(RequestBooks[str](), a=16).snapshot() == {}


events = st.one_of(
    st.tuples(st.just("miss"), st.sampled_from(REASONS)),
    st.tuples(st.just("hit"), st.none()),
    st.tuples(st.just("serve"), st.sampled_from(["host", "disk"])),
)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), events), max_size=40),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 100)),
)
def test_asked_is_served_and_missed(
    history: list[tuple[str, tuple[str, object]]], chunk_tokens: dict[str, int]
) -> None:
    """Whatever happens in whatever order: each chunk is in one of the three, each token once."""
    books = RequestBooks[str]()
    expected: dict[str, tuple[str, str]] = {}
    for key, (event, value) in history:
        served, reason = expected.get(key, ("", ""))
        if event == "serve":
            books.serve(key, str(value))
            if served or reason in ("", "absent", "unread"):
                expected[key] = (str(value), "")
        elif event == "hit":
            books.hit(key)
            if not served and reason in ("", "absent"):
                expected[key] = ("", "unread")
        else:
            books.miss(key, Reason(value))
            if not served and reason in ("", "absent", "unread"):
                expected[key] = ("", str(value))
        assert not set(books.served) & set(books.misses)
        assert not books.unread & (set(books.served) | set(books.misses))
        assert books.unread | set(books.served) | set(books.misses) == set(expected)
        assert all(books.may_ask(each) for each in "abcdef" if each not in expected)
    metrics = count(books, **chunk_tokens)
    lookups = Counter(("hit" if tier else "miss", reason) for tier, reason in expected.values())
    assert series(metrics, "lookups") == lookups
    tokens = sum(chunk_tokens.get(key, 0) for key in expected)
    assert metrics.value("asked_tokens") == tokens
    assert metrics.value("served_tokens") + metrics.value("missed_tokens") == tokens
    for tier in ("host", "disk"):
        assert metrics.value("served_tokens", tier=tier) == sum(
            chunk_tokens.get(key, 0) for key, (served, _) in expected.items() if served == tier
        )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_requests_add_up(numbers: list[int]) -> None:
    """Many requests share one table of counters."""
    metrics = Metrics()
    for number in numbers:
        books = RequestBooks[int]()
        for key in range(number):
            books.serve(key, "disk") if key % 2 else books.miss(key, Reason.ABSENT)
        books.count(metrics, dict.fromkeys(range(number), 16))
    assert metrics.value("asked_tokens") == 16 * sum(numbers)
    assert metrics.value("lookups") == sum(numbers)


# Tiers that have to find out.


def test_a_request_waits_for_what_is_not_known_and_not_for_ever() -> None:
    books: RequestBooks[str] = RequestBooks()
    assert books.may_wait(0.0, 2.0)
    assert books.unknown("a", 10.0, 2.0) is Lookup.UNKNOWN
    assert books.unknown("b", 11.9, 2.0) is Lookup.UNKNOWN
    assert books.misses == {}
    assert books.unknown("b", 12.0, 2.0) is Lookup.MISS
    assert books.misses == {"b": Reason.DEADLINE}
    assert not books.may_wait(12.0, 2.0)
    assert not books.may_ask("b")


def test_what_was_known_before_goes_on_to_hold() -> None:
    """A request that stays in the queue asks at every step, and beliefs age meanwhile."""
    books: RequestBooks[str] = RequestBooks()
    assert books.unknown("hit", 0.0, 2.0) is Lookup.UNKNOWN
    books.hit("hit")
    books.miss("miss", Reason.ABSENT)
    for now_s in (1.0, 100.0, 10_000.0):
        assert books.unknown("hit", now_s, 2.0) is Lookup.HIT
        assert books.unknown("miss", now_s, 2.0) is Lookup.MISS
    assert books.misses == {"miss": Reason.ABSENT}
    assert books.may_ask("miss"), "another engine may write it yet"
