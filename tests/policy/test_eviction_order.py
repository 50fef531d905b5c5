"""What each eviction policy is for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.policy.eviction import EvictionPolicy, make_policy

ENDS_FIRST = ["leaf-first-lru", "s3-fifo", "arc"]


def nothing_held(item: int) -> bool:
    return False


def drain(policy: EvictionPolicy) -> list[int]:
    items = []
    while (item := policy.evict(nothing_held)) is not None:
        items.append(item)
    return items


PREFIXES = st.lists(st.integers(0, 1000), min_size=1, max_size=40, unique=True)


@pytest.mark.parametrize("name", ENDS_FIRST)
@given(prefix=PREFIXES)
def test_a_prefix_is_shortened_from_its_end(name: str, prefix: list[int]) -> None:
    policy = make_policy(name)
    policy.insert(prefix, prefix)
    assert drain(policy) == prefix[::-1]


@pytest.mark.parametrize("name", ["leaf-first-lru", "arc"])
@given(prefix=PREFIXES, data=st.data())
def test_a_prefix_touched_is_shortened_from_its_end(
    name: str, prefix: list[int], data: st.DataObject
) -> None:
    policy = make_policy(name)
    entered = data.draw(st.permutations(prefix))
    policy.insert(entered, entered)
    policy.touch(prefix)
    assert drain(policy) == prefix[::-1]


@given(
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=8),
    touched=st.lists(st.integers(0, 7), max_size=20),
)
def test_a_prefix_touched_again_outlives_one_that_was_not(
    sizes: list[int], touched: list[int]
) -> None:
    policy = make_policy("leaf-first-lru")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    prefixes = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    for prefix in prefixes:
        policy.insert(prefix, prefix)
    recency = list(range(len(prefixes)))
    for idx in touched:
        if idx < len(prefixes):
            policy.touch(prefixes[idx])
            recency.remove(idx)
            recency.append(idx)
    assert drain(policy) == [item for idx in recency for item in prefixes[idx][::-1]]


@given(shared=st.integers(1, 5), own=st.integers(1, 5))
def test_what_two_prefixes_share_outlives_both_ends(shared: int, own: int) -> None:
    policy = make_policy("leaf-first-lru")
    head = list(range(shared))
    one = [*head, *range(10, 10 + own)]
    other = [*head, *range(20, 20 + own)]
    policy.insert(one, one)
    policy.insert(other[shared:], other[shared:])
    policy.touch(other)
    assert drain(policy) == one[: shared - 1 : -1] + other[::-1]


def test_lru_loses_the_head_of_a_prefix_first() -> None:
    policy = make_policy("lru")
    policy.insert([1, 2, 3], [1, 2, 3])
    policy.insert([4], [4])
    policy.touch([2, 1])
    assert drain(policy) == [3, 4, 2, 1]


def test_fifo_does_not_mind_use() -> None:
    policy = make_policy("fifo")
    policy.insert([1, 2, 3], [1, 2, 3])
    policy.insert([0], [0])
    policy.touch([1, 2])
    assert drain(policy) == [1, 2, 3, 0]


@pytest.mark.parametrize("name", ["leaf-first-lru", "lru", "fifo"])
def test_a_held_item_that_is_met_becomes_the_newest(name: str) -> None:
    policy = make_policy(name)
    for item in range(4):
        policy.insert([item], [item])
    assert policy.evict({0, 1}.__contains__) == 2
    assert policy.in_order() == [3, 0, 1]


def test_s3_fifo_keeps_what_was_touched_twice_and_what_returns() -> None:
    policy = make_policy("s3-fifo")
    for item in range(20):
        policy.insert([item], [item])
    for _ in range(2):
        policy.touch([0])
    policy.touch([1])
    # 0 goes on to the main queue; one touch does not keep 1; 2 follows, untouched.
    assert [policy.evict(nothing_held) for _ in range(2)] == [1, 2]
    # Tag 1 is remembered, so its chunk enters the main queue; tag 100 is new.
    policy.insert([1], [1])
    policy.insert([2], [100])
    assert policy.in_order() == [*range(3, 20), 2, 0, 1]


def test_s3_fifo_remembers_as_many_as_the_main_queue_may_hold() -> None:
    """Of 20 chunks that left a cache of 20, the last 18 are known."""
    policy = make_policy("s3-fifo")
    for item in range(20):
        policy.insert([item], [item])
    for item in range(20):
        assert policy.evict(nothing_held) == item
        policy.insert([item], [100 + item])
    policy.insert([20], [1])
    assert policy.in_order() == [*range(20), 20]  # the newest of the small queue
    policy.insert([21], [2])
    assert policy.in_order() == [*range(21), 21]  # in the main queue, which comes after
    policy.insert([22], [101])
    assert policy.in_order() == [*range(21), 22, 21]


def test_arc_protects_what_was_used_again_from_a_scan() -> None:
    policy = make_policy("arc")
    policy.insert(list(range(10)), list(range(10)))
    policy.touch([0, 1, 2, 3, 4])
    for tag in range(100, 150):
        item = policy.evict(nothing_held)
        assert item is not None
        policy.insert([item], [tag])
    assert all(item in policy for item in range(5))
    assert policy.in_order()[5:] == [4, 3, 2, 1, 0]


def test_arc_gives_room_to_the_list_that_was_cut_too_short() -> None:
    """Chunks that left the first list return, so the next victims come from the second."""
    policy = make_policy("arc")
    policy.insert([0, 1, 2, 3], [0, 1, 2, 3])
    policy.touch([2, 3])
    assert policy.evict(nothing_held) == 1
    policy.insert([1], [1])  # returns: the target is 1, and so is the length of the first list
    assert policy.in_order() == [0, 3, 2, 1]
    assert policy.evict(nothing_held) == 3
