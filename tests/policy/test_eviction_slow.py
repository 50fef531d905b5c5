"""Every eviction policy does exactly what its slow reference does."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from stepwell.policy.eviction import POLICY_NAMES, make_policy

from .slow import make_slow

NUM_ROWS = 10
# Few, so that what left comes back, and that two rows may have the same one.
NUM_TAGS = 16

ROWS = st.integers(0, NUM_ROWS - 1)
TAGS = st.integers(0, NUM_TAGS - 1)


def machine_of(name: str) -> type[RuleBasedStateMachine]:
    class PolicyMachine(RuleBasedStateMachine):
        """Two policies that hear and answer the same."""

        def __init__(self) -> None:
            super().__init__()
            self.fast = make_policy(name)
            self.slow = make_slow(name)

        @rule(entries=st.dictionaries(ROWS, TAGS, max_size=6))
        def insert(self, entries: dict[int, int]) -> None:
            new = {row: tag for row, tag in entries.items() if row not in self.slow}
            self.fast.insert(list(new), list(new.values()))
            self.slow.insert(list(new), list(new.values()))

        @rule(row=ROWS, tag=TAGS)
        def insert_anew(self, row: int, tag: int) -> None:
            self.fast.insert([row], [tag])
            self.slow.insert([row], [tag])

        @rule(prefix=st.lists(st.integers(-2, NUM_ROWS + 2), max_size=6))
        def touch(self, prefix: list[int]) -> None:
            self.fast.touch(prefix)
            self.slow.touch(prefix)

        @rule(row=st.integers(-2, NUM_ROWS + 2))
        def remove(self, row: int) -> None:
            self.fast.remove(row)
            self.slow.remove(row)

        @rule(held=st.sets(ROWS), times=st.integers(1, 3))
        def evict(self, held: set[int], times: int) -> None:
            for _ in range(times):
                assert self.fast.evict(held.__contains__) == self.slow.evict(held.__contains__)

        @rule(tags=st.lists(TAGS, min_size=1, max_size=4, unique=True))
        def replace(self, tags: list[int]) -> None:
            """As an owner does it: one leaves for each that comes."""
            for tag in tags:
                row = self.slow.evict(lambda row: False)
                assert self.fast.evict(lambda row: False) == row
                if row is not None:
                    self.fast.insert([row], [tag])
                    self.slow.insert([row], [tag])

        @invariant()
        def the_same_items(self) -> None:
            assert self.fast.in_order() == self.slow.in_order()
            assert len(self.fast) == len(self.slow)
            for row in range(-2, NUM_ROWS + 2):
                assert (row in self.fast) == (row in self.slow)

    return PolicyMachine


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_short_histories(name: str) -> None:
    run_state_machine_as_test(
        machine_of(name), settings=settings(max_examples=150, stateful_step_count=40)
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_long_histories(name: str, seed: int) -> None:
    """A cache that fills, is full for long, shrinks and fills again, with prefixes that return."""
    rng = random.Random(seed)
    fast, slow = make_policy(name), make_slow(name)
    row_of: dict[int, int] = {}
    tag_at: dict[int, int] = {}
    free = list(range(300))
    held: set[int] = set()
    for step in range(3000):
        capacity = (120, 300, 40)[step // 500 % 3]
        if step % 7 == 0:
            held = {rng.randrange(300) for _ in range(rng.choice([0, 0, 20, 200]))}
        session, length = int(rng.paretovariate(0.7)) % 200, rng.randrange(1, 30)
        tags = [session * 1000 + position for position in range(length)]
        prefix = [row_of[tag] for tag in tags if tag in row_of]
        fast.touch(prefix)
        slow.touch(prefix)
        missing = [tag for tag in tags if tag not in row_of]
        while len(row_of) + len(missing) > capacity:
            victim = slow.evict(held.__contains__)
            assert fast.evict(held.__contains__) == victim, f"step={step}"
            if victim is None:
                break
            del row_of[tag_at.pop(victim)]
            free.append(victim)
        if len(missing) <= len(free):
            rows = [free.pop(rng.randrange(len(free))) for _ in missing]
            fast.insert(rows, missing)
            slow.insert(rows, missing)
            row_of.update(zip(missing, rows, strict=True))
            tag_at.update(zip(rows, missing, strict=True))
        if rng.random() < 0.1:
            for row in rng.sample(sorted(tag_at), len(tag_at) // 10):
                fast.remove(row)
                slow.remove(row)
                del row_of[tag_at.pop(row)]
                free.append(row)
        assert fast.in_order() == slow.in_order(), f"step={step}"
        assert len(fast) == len(row_of)
