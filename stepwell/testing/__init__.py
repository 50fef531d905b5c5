"""For people who write a tier: the contract suite, a state machine, and faulty tiers.

Needs the extra ``stepwell[test]``. A tier's tests look like this::

    from stepwell.testing import TierContract, tier_machine

    class TestMyTier(TierContract):
        def make_tier(self, context, capacity_bytes, *, inflight_writes_bytes): ...
        def used_bytes(self, tier): ...
        def size_of(self, payload_bytes): ...
        def stalled(self): ...

    TestMyTierMachine = tier_machine(make_tier).TestCase
"""

import pytest

# Before the import: a failing contract shows the values that it compared.
pytest.register_assert_rewrite("stepwell.testing.contract", "stepwell.testing.driving",
                               "stepwell.testing.machine", "stepwell.testing.shared")  # fmt: skip

from stepwell.testing.contract import BoundedTierContract, TierContract  # noqa: E402
from stepwell.testing.driving import Driver, buffer_of, key_of, payload_of  # noqa: E402
from stepwell.testing.faulty import FaultyTier  # noqa: E402
from stepwell.testing.machine import tier_machine  # noqa: E402
from stepwell.testing.shared import SharedTierContract  # noqa: E402

__all__ = [
    "BoundedTierContract",
    "Driver",
    "FaultyTier",
    "SharedTierContract",
    "TierContract",
    "buffer_of",
    "key_of",
    "payload_of",
    "tier_machine",
]
