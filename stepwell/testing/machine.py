"""A state machine that compares a tier with a dictionary, over random histories."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.clock import ManualClock
from stepwell.core.keys import Key
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.testing.driving import Driver, key_of, payload_of
from stepwell.tiers.base import Tier, TierContext

__all__ = ["tier_machine"]

KEYS = [key_of(idx, root) for root in ("one", "two") for idx in range(6)]
LENGTHS = (1, 4095, 4096, 5000)

prefixes = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)


def length_of(key: Key) -> int:
    """A payload's length, always the same for a key."""
    return LENGTHS[key[-1] % len(LENGTHS)]


def tier_machine(
    make_tier: Callable[[TierContext, Path], Tier],
    *,
    persistent: bool = False,
    max_examples: int = 25,
    steps: int = 30,
) -> type[RuleBasedStateMachine]:
    """A machine for a tier that has room for every key (12 chunks of at most 5000 bytes).

    Args:
        make_tier: makes the tier at a place, an empty directory the first time.
        persistent: whether a tier made again at the same place finds what was written.
        max_examples: histories that are tried.
        steps: operations in each.
    """

    class TierMachine(RuleBasedStateMachine):
        """Write, read, delete, touch, reopen; the model is a set of keys."""

        place: Path
        driver: Driver

        def __init__(self) -> None:
            super().__init__()
            self.model: set[Key] = set()
            self.deleted: set[Key] = set()

        @initialize()
        def start(self) -> None:
            self.place = Path(tempfile.mkdtemp(prefix="tier-machine-"))
            self.context = TierContext(clock=ManualClock())
            self.driver = Driver(make_tier(self.context, self.place))

        def teardown(self) -> None:
            if hasattr(self, "driver"):
                self.driver.tier.close()
                shutil.rmtree(self.place, ignore_errors=True)

        @rule(prefix=prefixes)
        def write(self, prefix: list[Key]) -> None:
            for key in prefix:
                (result,) = self.driver.write([key], length_of(key))
                # The space of what was deleted may follow a little later.
                while key in self.deleted and result.outcome is Outcome.FULL:
                    (result,) = self.driver.write([key], length_of(key))
                assert result.outcome is Outcome.DONE
                assert (result.reason is Reason.EXISTS) == (key in self.model)
                self.model.add(key)
                self.deleted.discard(key)

        @rule(prefix=prefixes)
        def read(self, prefix: list[Key]) -> None:
            for length in {length_of(key) for key in prefix}:
                keys = [key for key in prefix if length_of(key) == length]
                result, contents = self.driver.read(keys, length)
                for key, outcome, content in zip(keys, result.results, contents, strict=True):
                    if key in self.model:
                        assert outcome.outcome is Outcome.DONE
                        assert content == payload_of(key, length)
                    else:
                        assert outcome == ABSENT

        @rule(prefix=prefixes)
        def touch(self, prefix: list[Key]) -> None:
            found = [r.outcome is Outcome.DONE for r in self.driver.touch(prefix)]
            assert found == [key in self.model for key in prefix]

        @rule(prefix=prefixes)
        def delete(self, prefix: list[Key]) -> None:
            assert self.driver.tier.delete(prefix) == len(self.model & set(prefix))
            self.deleted |= self.model & set(prefix)
            self.model -= set(prefix)

        @rule()
        def reopen(self) -> None:
            self.driver.tier.close()
            self.driver = Driver(make_tier(self.context, self.place))
            self.deleted.clear()
            if not persistent:
                self.model.clear()

        @invariant()
        def contains_agrees(self) -> None:
            if hasattr(self, "driver"):
                assert self.driver.present(KEYS) == [key in self.model for key in KEYS]

    TierMachine.TestCase.settings = settings(
        max_examples=max_examples, stateful_step_count=steps, deadline=None
    )
    return TierMachine
