"""A writer that is killed at any moment: what the next process finds."""

import os
import random
import signal
import subprocess
import sys
import time

from stepwell.core.keys import Key
from stepwell.core.types import Outcome
from stepwell.testing import key_of, payload_of
from stepwell.tiers.directory import StoreDirectory

from .conftest import DiskPlace

PAYLOAD_BYTES = 200_000
NUM_KEYS = 40
NUM_CHUNKS = 20
KILLS = 6

# Writes, reads, deletes and evicts as fast as it can until somebody kills it.
WRITER = """
import random, sys
from pathlib import Path
from stepwell.core.record import record_bytes
from stepwell.testing import Driver, key_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier

path, seed, payload_bytes, num_keys, num_chunks = sys.argv[1], *map(int, sys.argv[2:])
tier = DiskTier(Path(path), num_chunks * record_bytes(payload_bytes), TierContext(), num_threads=4)
driver = Driver(tier, payload_bytes)
rng = random.Random(seed)
print("open", flush=True)
while True:
    keys = [key_of(rng.randrange(num_keys)) for _ in range(8)]
    driver.write(keys)
    driver.read(keys[:2])
    tier.delete(keys[:1])
"""


def run_and_kill(place: DiskPlace, seed: int, after_s: float) -> None:
    numbers = [str(n) for n in (seed, PAYLOAD_BYTES, NUM_KEYS, NUM_CHUNKS)]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(place.path), *numbers],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        time.sleep(after_s)
        assert writer.poll() is None, "it was to run until it is killed"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()


def test_a_killed_writer_leaves_whole_records_only(place: DiskPlace) -> None:
    """Killed again and again on one directory: all that is found is whole, nothing else is left."""
    rng = random.Random(2)
    keys: list[Key] = [key_of(idx) for idx in range(NUM_KEYS)]
    for seed in range(KILLS):
        run_and_kill(place, seed, rng.uniform(0.005, 0.15))
        found = {record.key for record in StoreDirectory(place.path).scan()}
        driver = place.open(NUM_CHUNKS, payload_bytes=PAYLOAD_BYTES)
        assert driver.present(keys) == [key in found for key in keys]
        place.check_books()
        assert all(path.stat().st_size > PAYLOAD_BYTES for path in place.files("roots"))
        result, contents = driver.read(keys)
        for key, chunk_result, content in zip(keys, result.results, contents, strict=True):
            # A SIGKILL is no power cut: what was renamed into its place is whole.
            assert (chunk_result.outcome is Outcome.DONE) == (key in found)
            assert key not in found or content == payload_of(key, PAYLOAD_BYTES)
        assert driver.write(keys[:5])[0].outcome is Outcome.DONE
        assert driver.read(keys[:5])[0].done
        place.check_books()
        place.close()
    assert place.reason("quarantined_chunks", "checksum") == 0
