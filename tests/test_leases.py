"""Leases: they hold, they run out, and nothing is left of them."""

import pytest

from stepwell.clock import ManualClock
from stepwell.core.leases import LeaseTable
from stepwell.testing import key_of

KEYS = [key_of(idx) for idx in range(3)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def table(clock: ManualClock) -> LeaseTable:
    return LeaseTable(clock.monotonic)


def held(table: LeaseTable) -> list[bool]:
    return [table.held(key) for key in KEYS]


def test_a_lease_holds_until_it_is_released(table: LeaseTable) -> None:
    lease = table.acquire(KEYS[:2], 10.0)
    assert lease.keys == tuple(KEYS[:2])
    assert held(table) == [True, True, False]
    lease.release()
    assert held(table) == [False] * 3
    lease.release()  # harmless


def test_a_lease_runs_out_by_itself(table: LeaseTable, clock: ManualClock) -> None:
    lease = table.acquire(iter(KEYS), 10.0)
    assert lease.expires_s == clock.monotonic() + 10.0
    clock.advance(9.999)
    assert held(table) == [True] * 3
    clock.advance(0.001)
    assert held(table) == [False] * 3
    lease.release()  # harmless


def test_a_lease_is_released_by_its_block_also_when_that_fails(table: LeaseTable) -> None:
    with table.acquire(KEYS, 10.0):
        assert held(table) == [True] * 3
    assert held(table) == [False] * 3
    with pytest.raises(RuntimeError), table.acquire(KEYS, 10.0):
        raise RuntimeError
    assert held(table) == [False] * 3


def test_the_longest_of_several_leases_counts(table: LeaseTable, clock: ManualClock) -> None:
    short, long = table.acquire(KEYS, 5.0), table.acquire(KEYS[1:], 10.0)
    clock.advance(5.0)
    assert held(table) == [False, True, True]
    short.release()
    assert held(table) == [False, True, True]
    long.release()
    assert held(table) == [False] * 3


def test_releasing_one_lease_leaves_the_other(table: LeaseTable) -> None:
    one, two = table.acquire(KEYS, 5.0), table.acquire(KEYS, 5.0)
    one.release()
    one.release()
    assert held(table) == [True] * 3
    two.release()
    assert held(table) == [False] * 3


@pytest.mark.parametrize("ttl_s", [0.0, -1.0])
def test_a_lease_lasts_for_some_time(table: LeaseTable, ttl_s: float) -> None:
    with pytest.raises(ValueError, match=f"ttl_s={ttl_s}"):
        table.acquire(KEYS, ttl_s)
    assert held(table) == [False] * 3


def test_a_table_stays_small_if_nobody_releases(table: LeaseTable, clock: ManualClock) -> None:
    """An engine that forgets its leases costs no memory for ever."""
    import sys

    def size() -> int:
        return sum(sys.getsizeof(value) for value in vars(table).values())

    for idx in range(200):
        table.acquire([key_of(f"k{idx}")], 1.0)
    large = size()
    clock.advance(2.0)
    table.acquire(KEYS, 1.0)
    for idx in range(200):
        clock.advance(2.0)
        table.acquire([key_of(f"m{idx}")], 1.0)
    assert size() <= large
    assert not table.held(key_of("k0"))
