"""The lists that eviction policies are made of, against plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.policy.ghosts import Ghosts
from stepwell.policy.linked import LinkedLists

NUM_LISTS = 3

PUSHES = st.tuples(st.integers(0, 12), st.integers(0, NUM_LISTS - 1))
REMOVALS = st.tuples(st.integers(-4, 15), st.none())


@given(calls=st.lists(PUSHES | REMOVALS, max_size=60))
def test_lists_over_the_same_rows(calls: list[tuple[int, int | None]]) -> None:
    lists = LinkedLists(NUM_LISTS)
    model: list[list[int]] = [[] for _ in range(NUM_LISTS)]
    for row, which in calls:
        for rows in model:
            if row in rows:
                rows.remove(row)
        if which is None:
            lists.remove(row)
        else:
            lists.push(row, which)
            model[which].append(row)
        assert [lists.rows(i) for i in range(NUM_LISTS)] == model
        assert [lists.length(i) for i in range(NUM_LISTS)] == [len(rows) for rows in model]
        assert len(lists) == sum(len(rows) for rows in model)
        for i, rows in enumerate(model):
            assert (lists.oldest(i) == rows[0]) if rows else (lists.oldest(i) < 0)
        for other in range(-4, 16):
            home = next((i for i, rows in enumerate(model) if other in rows), -1)
            assert lists.home(other) == home
            assert (other in lists) == (home >= 0)


def test_a_negative_row_is_refused() -> None:
    lists = LinkedLists()
    with pytest.raises(ValueError, match=r"row=-1$"):
        lists.push(-1)
    assert len(lists) == 0


# The last few have equal lower bits, then equal higher ones.
TAGS = st.integers(0, 20) | st.integers(0, 3).map(lambda i: i << 58) | st.integers(0, 2**60 - 1)
ADDITIONS = st.tuples(TAGS, st.integers(0, 1))
TAKINGS = st.tuples(TAGS, st.none())
DROPS = st.tuples(st.none(), st.integers(0, 1))


@given(calls=st.lists(ADDITIONS | TAKINGS | DROPS, max_size=80))
def test_ghosts(calls: list[tuple[int | None, int | None]]) -> None:
    ghosts = Ghosts(2)
    model: list[list[int]] = [[], []]
    for tag, which in calls:
        home = next((i for i, tags in enumerate(model) if tag in tags), -1)
        if tag is None:
            assert which is not None
            if model[which]:
                ghosts.drop_oldest(which)
                model[which].pop(0)
            continue
        if home >= 0:
            model[home].remove(tag)
        if which is None:
            assert ghosts.take(tag) == home
            assert ghosts.take(tag) == -1
        else:
            ghosts.add(tag, which)
            model[which].append(tag)
        assert [ghosts.length(i) for i in range(2)] == [len(tags) for tags in model]
        assert len(ghosts) == sum(len(tags) for tags in model)


@pytest.mark.parametrize("stride", [1, 1 << 10, 1 << 40])
def test_many_ghosts(stride: int) -> None:
    """Thousands come, half go, and their places are taken again."""
    ghosts = Ghosts()
    for i in range(5000):
        ghosts.add(i * stride)
    for _ in range(2500):
        ghosts.drop_oldest()
    for i in range(5000, 7500):
        ghosts.add(i * stride)
    assert len(ghosts) == 5000
    assert all(ghosts.take(i * stride) == -1 for i in range(2500))
    assert all(ghosts.take(i * stride) == 0 for i in range(2500, 7500))
    assert len(ghosts) == 0
