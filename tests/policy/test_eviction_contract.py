"""What holds for every eviction policy."""

import random

import pytest

from stepwell.errors import ConfigError
from stepwell.policy.eviction import POLICY_NAMES, EvictionPolicy, make_policy, refill

ONE_LIST = ["leaf-first-lru", "lru", "fifo"]


def nothing_held(item: int) -> bool:
    return False


def drain(policy: EvictionPolicy) -> list[int]:
    items = []
    while (item := policy.evict(nothing_held)) is not None:
        items.append(item)
    return items


def well_used(name: str, num_items: int = 200) -> EvictionPolicy:
    """A full policy with a history: some touched never, some often; some that left and returned."""
    rng = random.Random(5)
    policy = make_policy(name)
    policy.insert(list(range(num_items)), list(range(num_items)))
    for step in range(10 * num_items):
        start = int(rng.random() ** 2 * num_items)
        policy.touch(list(range(start, min(start + 8, num_items))))
        if step % 2:
            item = policy.evict(nothing_held)
            assert item is not None
            policy.insert([item], [int(rng.random() ** 2 * 3 * num_items)])
    return policy


@pytest.fixture(params=POLICY_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_names() -> None:
    assert POLICY_NAMES == ("leaf-first-lru", "lru", "fifo", "s3-fifo", "arc")
    assert [make_policy(name).name for name in POLICY_NAMES] == list(POLICY_NAMES)
    assert make_policy().name == "leaf-first-lru"


def test_an_unknown_name_says_which_are_known() -> None:
    with pytest.raises(ConfigError, match=r"arc: policy='belady'$"):
        make_policy("belady")


def test_an_empty_policy(name: str) -> None:
    policy = make_policy(name)
    assert len(policy) == 0
    assert 0 not in policy
    assert policy.in_order() == []
    assert policy.evict(nothing_held) is None
    policy.touch([])
    policy.touch([3])
    policy.remove(3)
    policy.insert([], [])
    assert len(policy) == 0


def test_each_item_leaves_exactly_once(name: str) -> None:
    policy = well_used(name)
    assert sorted(drain(policy)) == list(range(200))
    assert len(policy) == 0
    assert policy.in_order() == []


def test_len_and_contains(name: str) -> None:
    policy = make_policy(name)
    policy.insert([4, 7], [40, 70])
    policy.insert([2], [20])
    assert len(policy) == 3
    assert [item for item in range(-3, 12) if item in policy] == [2, 4, 7]
    item = policy.evict(nothing_held)
    assert item is not None
    assert item not in policy
    assert len(policy) == 2


def test_a_single_item(name: str) -> None:
    policy = make_policy(name)
    for tag in [1, 2, 1, 1, 3, 2]:
        policy.insert([5], [tag])
        policy.touch([5])
        assert policy.evict(nothing_held) == 5
        assert len(policy) == 0


def test_held_items_stay(name: str) -> None:
    policy = well_used(name)
    rng = random.Random(9)
    left: set[int] = set()
    while len(left) < 200:
        held = {rng.randrange(200) for _ in range(400)}
        item = policy.evict(held.__contains__)
        if item is None:
            assert held >= set(range(200)) - left
            continue
        assert item not in held
        assert item not in left
        left.add(item)


def test_none_if_all_are_held(name: str) -> None:
    policy = well_used(name)
    assert policy.evict(lambda item: True) is None
    assert len(policy) == 200
    assert sorted(policy.in_order()) == list(range(200))
    assert sorted(drain(policy)) == list(range(200))


def test_the_only_one_not_held_is_found(name: str) -> None:
    for wanted in range(0, 200, 23):
        others = set(range(200)) - {wanted}
        assert well_used(name).evict(others.__contains__) == wanted


def test_a_walk_asks_for_no_item_more_often_than_its_use_counts(name: str) -> None:
    """Once, but for S3-FIFO: once around each queue, and again while others are counted down."""
    limit = 5 if name == "s3-fifo" else 1
    asked: dict[int, int] = {}

    def held(item: int) -> bool:
        asked[item] = asked.get(item, 0) + 1
        return True

    assert well_used(name).evict(held) is None
    assert len(asked) == 200
    assert max(asked.values()) <= limit


def test_held_items_are_walked_over_once(name: str) -> None:
    """The next walk does not begin with them again: twice around all for 100 victims."""
    policy = make_policy(name)
    policy.insert(list(range(1000)), list(range(1000)))
    num_asked = 0

    def held(item: int) -> bool:
        nonlocal num_asked
        num_asked += 1
        return item >= 500

    for _ in range(100):
        assert policy.evict(held) is not None
    assert num_asked <= 2000


def test_removing_is_harmless_and_final(name: str) -> None:
    policy = well_used(name)
    expected = [item for item in policy.in_order() if item % 3]
    for item in [*range(0, 200, 3), 0, 3, -1, 200, 10**6]:
        policy.remove(item)
    assert policy.in_order() == expected
    assert len(policy) == len(expected)
    policy.touch(list(range(200)))
    assert 0 not in policy
    assert sorted(drain(policy)) == sorted(expected)


def test_the_order_names_every_item_once(name: str) -> None:
    policy = well_used(name)
    assert sorted(policy.in_order()) == list(range(200))
    assert policy.in_order() == policy.in_order()


def test_entering_an_item_that_is_there_makes_it_new(name: str) -> None:
    def history(policy: EvictionPolicy, *, removed: bool) -> list[int]:
        policy.insert([0, 1, 2, 3], [10, 11, 12, 13])
        policy.touch([1, 2])
        policy.touch([1, 2])
        if removed:
            policy.remove(1)
        policy.insert([1], [21])
        assert len(policy) == 4
        return drain(policy)

    assert history(make_policy(name), removed=False) == history(make_policy(name), removed=True)


def test_wrong_calls(name: str) -> None:
    policy = make_policy(name)
    policy.insert([1], [1])
    with pytest.raises(ValueError, match=r"items=2 tags=1$"):
        policy.insert([2, 3], [1])
    with pytest.raises(ValueError, match=r"row=-1$"):
        policy.insert([-1], [7])
    assert policy.in_order() == [1]


@pytest.mark.parametrize("leaves", ["evict", "remove"])
def test_a_row_handed_out_again_knows_nothing_of_its_past(name: str, leaves: str) -> None:
    """Two policies get the same new chunks, one of them in rows whose chunks were used a lot."""
    used = make_policy(name)
    rows = list(range(60))
    used.insert(rows, [1000 + row for row in rows])
    for times in range(4):
        used.touch([row for row in rows if row % 5 <= times])
    if leaves == "evict":
        assert len(drain(used)) == 60
    for row in rows:
        used.remove(row)
    new = make_policy(name)
    for policy in (used, new):
        policy.insert(rows, [2000 + row for row in rows])
        policy.touch(rows[10:20])
        policy.touch(rows[15:30])
    assert used.in_order() == new.in_order()
    assert drain(used) == drain(new)


@pytest.mark.parametrize("name", ONE_LIST)
def test_the_order_is_exact_where_there_is_one_list(name: str) -> None:
    policy = well_used(name)
    order = policy.in_order()
    assert drain(policy) == order


@pytest.mark.parametrize("name", ONE_LIST)
def test_the_order_survives_a_checkpoint(name: str) -> None:
    order = well_used(name).in_order()
    policy = make_policy(name)
    refill(policy, order, [1000 + item for item in order])
    assert policy.in_order() == order
    assert drain(policy) == order


@pytest.mark.parametrize("name", ["s3-fifo", "arc"])
def test_the_order_of_a_checkpoint_is_kept_among_new_items(name: str) -> None:
    order = well_used(name).in_order()
    policy = make_policy(name)
    refill(policy, order, [1000 + item for item in order])
    assert policy.in_order() == order


def test_a_checkpoint_needs_a_tag_per_item(name: str) -> None:
    with pytest.raises(ValueError, match="zip"):
        refill(make_policy(name), [1, 2], [1])


def test_a_checkpoint_in_one_call(name: str) -> None:
    """Where prefix ends leave first, the order backwards is a prefix; otherwise the order is."""
    order = well_used(name).in_order()
    policy = make_policy(name)
    backwards = name not in {"lru", "fifo"}
    policy.insert(order[::-1] if backwards else order, list(range(200)))
    assert policy.in_order() == order


def test_the_same_calls_end_the_same_way(name: str) -> None:
    assert drain(well_used(name)) == drain(well_used(name))
