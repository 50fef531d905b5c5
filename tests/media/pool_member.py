"""One member of a shared directory, as a process of its own: writes, or reads, until it is told.

    python -m tests.media.pool_member PATH CAPACITY ROLE SEED LEASE_S GONE_S AHEAD_S

Prints a line of JSON at its end: what it did, and what was wrong. ROLE is "write" or "read";
AHEAD_S is how far this host's clocks are ahead of the file system's. On a machine that is slow it
goes on, when it is told to end, until it has done a little.
"""

import json
import random
import signal
import sys
import time

from stepwell.core.types import Chunk, Direction, Lookup, Outcome
from stepwell.testing import Driver, buffer_of, key_of, payload_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.media import pool, sweep
from stepwell.tiers.media.fs import open_medium
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.shared import SharedTier

SIZE = 256 << 10
NUM_KEYS = 2000
LEAST = 20  # records that each writes or reads


def main() -> None:
    """See above."""
    path, capacity, role, seed, lease_s, gone_s, ahead_s = sys.argv[1:]
    sweep.LEASE_S, sweep.GONE_AFTER_S = float(lease_s), float(gone_s)
    pool._SILENT_S = float(gone_s) / 3
    ahead = float(ahead_s)
    if ahead:
        real, real_ns = time.time, time.time_ns
        time.time = lambda: real() + ahead
        time.time_ns = lambda: real_ns() + int(ahead * 1e9)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    url = MediumUrl("fs", path=path, parameters={"capacity": capacity, "min_free": "1MiB"})
    medium = open_medium(url, 60.0)
    medium.check()
    driver = Driver(SharedTier(medium, TierContext(), name="fs", num_threads=2))
    rng = random.Random(int(seed))
    done = {"written": 0, "refused": 0, "read": 0, "absent": 0, "wrong": 0, "bad": []}
    print("ready", flush=True)
    while not stopped or done["written"] + done["read"] < LEAST:
        # The first few are asked for all the time.
        keys = [key_of(int(NUM_KEYS * rng.random() ** 3)) for _ in range(4)]
        if role == "write":
            results = driver.write(keys, SIZE)
            done["written"] += sum(result.reason == "" for result in results)
            done["refused"] += sum(result.outcome is Outcome.FULL for result in results)
        else:
            there = [k for k in keys if driver.lookup([k]) == [Lookup.HIT]]
            chunks = [Chunk(key, buffer_of(SIZE)) for key in there]
            if not chunks:
                continue
            results = driver.wait(driver.submit(Direction.READ, chunks)).results
            for chunk, result in zip(chunks, results, strict=True):
                done["read"] += result.outcome is Outcome.DONE
                done["absent"] += result.reason == "absent"
                if result.outcome is Outcome.DONE:
                    done["wrong"] += bytes(chunk.buffer) != payload_of(chunk.key, SIZE)
                elif result.reason != "absent":
                    done["bad"].append(result.reason)
    driver.tier.close()
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
