"""The table of a tier: its states, its sum of bytes, and who leaves next."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.core.keys import Key
from stepwell.core.types import Lookup
from stepwell.policy.eviction import LeafFirstLru
from stepwell.testing import key_of
from stepwell.tiers.index import ChunkIndex, Reserve

A, B, C, D = (key_of(name) for name in "abcd")


def nobody(_: Key) -> bool:
    return False


def filled(capacity_bytes: int = 30, **sizes: int) -> ChunkIndex:
    index = ChunkIndex(capacity_bytes)
    for name, size_bytes in sizes.items():
        assert index.reserve(key_of(name), size_bytes) is Reserve.RESERVED
        index.commit(key_of(name))
    return index


def test_the_life_of_a_chunk() -> None:
    index = ChunkIndex(30)
    assert index.states([A]) == [Lookup.MISS]
    assert index.reserve(A, 10) is Reserve.RESERVED
    assert index.states([A]) == [Lookup.PENDING]
    assert index.reserve(A, 10) is Reserve.EXISTS
    assert (index.used_bytes, index.writing_bytes, len(index)) == (10, 10, 0)
    index.commit(A)
    assert index.states([A]) == [Lookup.HIT]
    assert index.reserve(A, 10) is Reserve.EXISTS
    assert (index.used_bytes, index.writing_bytes, len(index)) == (10, 0, 1)
    assert index.remove(A)
    assert index.states([A]) == [Lookup.MISS]
    assert index.reserve(A, 10) is Reserve.LEAVING
    assert (index.used_bytes, len(index)) == (10, 0)
    assert not index.remove(A)
    assert index.freed(A) == 10
    assert index.used_bytes == 0
    assert index.reserve(A, 10) is Reserve.RESERVED


def test_an_aborted_write_gives_its_bytes_back() -> None:
    index = ChunkIndex(30)
    index.reserve(A, 30)
    index.abort(A)
    assert index.used_bytes == 0
    assert index.states([A]) == [Lookup.MISS]
    assert index.reserve(B, 30) is Reserve.RESERVED


def test_the_last_byte_can_be_reserved_and_not_one_more() -> None:
    index = filled(30, a=10, b=10)
    assert index.reserve(C, 11) is Reserve.NO_ROOM
    assert index.reserve(C, 10) is Reserve.RESERVED
    assert index.reserve(D, 1) is Reserve.NO_ROOM
    assert index.reserve(D, 30) is Reserve.NO_ROOM
    assert index.reserve(D, 31) is Reserve.NEVER


def test_bytes_of_a_leaving_chunk_count_until_it_is_gone() -> None:
    index = filled(20, a=10, b=10)
    assert index.take_victim(nobody) == A
    assert index.reserve(C, 10) is Reserve.NO_ROOM
    index.freed(A)
    assert index.reserve(C, 10) is Reserve.RESERVED


def test_a_chunk_that_could_not_leave_is_present_and_recent() -> None:
    index = filled(30, a=10, b=10)
    assert index.take_victim(nobody) == A
    index.restore(A)
    assert index.states([A, B]) == [Lookup.HIT, Lookup.HIT]
    assert index.used_bytes == 20
    assert index.take_victim(nobody) == B


def test_held_chunks_are_passed_over() -> None:
    index = filled(30, a=10, b=10, c=10)
    assert index.take_victim(lambda key: key == A) == B
    assert index.take_victim(lambda key: key == A) == C
    assert index.take_victim(lambda key: key == A) is None
    assert index.take_victim(nobody) == A


def test_a_touch_orders_a_prefix_and_says_what_is_there() -> None:
    index = filled(30, a=10, b=10, c=10)
    assert index.touch([A, D, B]) == [True, False, True]
    assert [index.take_victim(nobody) for _ in range(4)] == [C, B, A, None]


def test_what_is_being_written_is_no_victim() -> None:
    index = filled(30, a=10)
    index.reserve(B, 10)
    index.touch([B])
    assert index.take_victim(nobody) == A
    assert index.take_victim(nobody) is None


def test_adopted_chunks_leave_in_the_order_of_adoption() -> None:
    index = ChunkIndex(15)
    for key in (B, A, C):
        index.adopt(key, 10)
    assert index.used_bytes == 30, "the capacity may have been lowered since"
    assert index.reserve(D, 1) is Reserve.NO_ROOM
    assert [index.take_victim(nobody) for _ in range(3)] == [B, A, C]


def test_leaf_first_lru() -> None:
    policy = LeafFirstLru()
    policy.touch([A, B])
    policy.touch([C])
    assert list(policy.victims()) == [B, A, C]
    policy.touch([A])
    assert list(policy.victims()) == [B, C, A]
    policy.remove(C)
    policy.remove(C)  # harmless
    assert list(policy.victims()) == [B, A]
    assert len(policy) == 2
    policy.touch([])
    policy.touch([A, B, D])
    assert list(policy.victims()) == [D, B, A]


class IndexMachine(RuleBasedStateMachine):
    """Any order of calls that a tier may make, against a dictionary of states and sizes."""

    CAPACITY = 50
    keys = st.sampled_from([A, B, C, D])

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(self.CAPACITY)
        self.state: dict[Key, tuple[str, int]] = {}
        self.order: list[Key] = []

    def of(self, state: str) -> list[Key]:
        return [key for key, (found, _) in self.state.items() if found == state]

    @rule(key=keys, size=st.integers(1, 60))
    def reserve(self, key: Key, size: int) -> None:
        state, _ = self.state.get(key, ("", 0))
        used = sum(size for _, size in self.state.values())
        if state in ("present", "writing"):
            expected = Reserve.EXISTS
        elif size > self.CAPACITY:
            expected = Reserve.NEVER
        elif state in ("leaving", "doomed"):
            expected = Reserve.LEAVING
        elif used + size > self.CAPACITY:
            expected = Reserve.NO_ROOM
        else:
            expected = Reserve.RESERVED
            self.state[key] = ("writing", size)
        assert self.index.reserve(key, size) is expected

    @precondition(lambda self: self.of("writing") or self.of("doomed"))
    @rule(data=st.data(), good=st.booleans())
    def end_write(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(self.of("writing") + self.of("doomed")))
        if good:
            wanted = self.state[key][0] == "writing"
            assert self.index.commit(key) == wanted
            self.state[key] = ("present" if wanted else "leaving", self.state[key][1])
            if wanted:
                self.order.append(key)
        else:
            self.index.abort(key)
            del self.state[key]

    @rule(key=keys)
    def remove(self, key: Key) -> None:
        here = key in self.of("present")
        assert self.index.remove(key) == here
        if here:
            self.leave(key)
        elif key in self.of("writing"):
            self.state[key] = ("doomed", self.state[key][1])

    @rule(held=st.sets(keys))
    def evict(self, held: set[Key]) -> None:
        expected = next((key for key in self.order if key not in held), None)
        assert self.index.take_victim(held.__contains__) == expected
        if expected is not None:
            self.leave(expected)

    def leave(self, key: Key) -> None:
        self.state[key] = ("leaving", self.state[key][1])
        self.order.remove(key)

    @precondition(lambda self: self.of("leaving"))
    @rule(data=st.data(), stays=st.booleans())
    def end_leaving(self, data: st.DataObject, stays: bool) -> None:
        key = data.draw(st.sampled_from(self.of("leaving")))
        if stays:
            self.index.restore(key)
            self.state[key] = ("present", self.state[key][1])
            self.order.append(key)
        else:
            assert self.index.freed(key) == self.state.pop(key)[1]

    @rule(prefix=st.lists(keys, unique=True))
    def touch(self, prefix: list[Key]) -> None:
        here = [key in self.of("present") for key in prefix]
        assert self.index.touch(prefix) == here
        for key in reversed([k for k, found in zip(prefix, here, strict=True) if found]):
            self.order.remove(key)
            self.order.append(key)

    @invariant()
    def sums_agree(self) -> None:
        sizes = dict.fromkeys(("present", "writing", "doomed", "leaving"), 0)
        for state, size in self.state.values():
            sizes[state] += size
        assert self.index.used_bytes == sum(sizes.values()) <= self.CAPACITY
        assert self.index.writing_bytes == sizes["writing"] + sizes["doomed"]
        assert len(self.index) == len(self.of("present")) == len(self.order)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, deadline=None)


def test_unknown_keys_end_no_write() -> None:
    """A second end of a write would count bytes twice."""
    index = filled(30, a=10)
    for call in (index.commit, index.abort, index.freed, index.restore):
        with pytest.raises(KeyError):
            call(A)
    assert index.used_bytes == 10
