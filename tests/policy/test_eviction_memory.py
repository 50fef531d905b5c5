"""What an eviction policy takes per item that it holds."""

import gc
import tracemalloc

import pytest

from stepwell.policy.eviction import POLICY_NAMES, EvictionPolicy, make_policy

NUM_ITEMS = 100_000

# Arrays are lengthened by 1/64 ahead; Python takes 1/16 more for an array, 1/8 for a bytearray.
INTS = 4 * 17 / 16
LONGS = 8 * 17 / 16
BYTES = 9 / 8
AHEAD = 65 / 64
# Two links, and a byte that says which list.
LINKED = (2 * INTS + BYTES) * AHEAD
# A tag, its place in the hash table (one bucket and one link), and its place in a list.
GHOST = LONGS + 2 * INTS + LINKED

BOUNDS = {
    "leaf-first-lru": LINKED,
    "lru": LINKED,
    "fifo": LINKED,
    # Per item its tag and a byte for its uses. Nine tags are remembered per ten items.
    "s3-fifo": LINKED + (LONGS + BYTES) * AHEAD + 0.9 * GHOST,
    # Per item its tag. A tag is remembered per item.
    "arc": LINKED + LONGS * AHEAD + GHOST,
}
# What does not grow with the items: 2 KB.
FIXED = 2048 / NUM_ITEMS


def tag_of(step: int) -> int:
    """Every second one comes back, some soon enough to be remembered."""
    number = step if step % 2 else step // 2 * 7919 % (3 * NUM_ITEMS)
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**60


def churn(policy: EvictionPolicy, tags: list[int]) -> None:
    held = {7}.__contains__
    for step, tag in enumerate(tags):
        row = policy.evict(held)
        assert row is not None
        policy.insert([row], [tag])
        if step % 2 == 0:
            policy.touch([row])


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_bytes_per_item(name: str) -> None:
    assert set(BOUNDS) == set(POLICY_NAMES)
    tags = [tag_of(step) for step in range(5 * NUM_ITEMS // 2)]
    gc.collect()
    tracemalloc.start()  # it makes every integer expensive, so only what is needed comes after
    try:
        before = tracemalloc.get_traced_memory()[0]
        policy = make_policy(name)
        for row in range(NUM_ITEMS):
            policy.insert([row], [tags[row]])
        policy.touch(range(NUM_ITEMS))  # ARC remembers most when most was used again
        # More leave than may be remembered.
        churn(policy, tags[NUM_ITEMS:])
        gc.collect()
        taken = (tracemalloc.get_traced_memory()[0] - before) / NUM_ITEMS
    finally:
        tracemalloc.stop()
    print(f"{name}: {taken:.2f} bytes per item, at most {BOUNDS[name]:.2f} expected")
    assert len(policy) == NUM_ITEMS
    assert taken <= BOUNDS[name] + FIXED
    # Otherwise less was remembered than the bound allows for, and this test shows nothing.
    assert taken >= 0.9 * BOUNDS[name]
