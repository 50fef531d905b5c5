"""A writer that is killed at any moment: nothing is lost but what was in flight.

``STEPWELL_KILLS`` says how often; 6 by default.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from stepwell.core.types import Outcome, Reason
from stepwell.testing import payload_of

from . import killed_writer
from .conftest import DiskPlace
from .killed_writer import CAPACITY_BYTES, NUM_KEYS, NUM_PINNED, size_of

KILLS = int(os.environ.get("STEPWELL_KILLS", "6"))
KEYS = killed_writer.keys()


class Known:
    """What the killed ones said, so far as it must hold.

    Attributes:
        there: chunks that were reported as written, not deleted since, and leased.
        gone: chunks that were deleted, which had ended, and not written since.
        leaving: chunks whose deletion had perhaps not ended.
        begun: chunks of which a record may lie in a slot that no journal names: a write of it was
            cut off, or it was evicted.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.there: set[int] = set()
        self.gone: set[int] = set()
        self.leaving: set[int] = set()
        self.begun: set[int] = set(range(NUM_PINNED, NUM_KEYS))
        self._asked: set[int] = set()
        self.wrong: list[str] = []
        self.num_written = 0
        self._read_bytes = 0
        log.touch()

    def read_on(self) -> None:
        """Take in what was said since; a last line that was cut off was never said."""
        text = self.log.read_bytes()[self._read_bytes :]
        whole = text[: text.rfind(b"\n") + 1]
        os.truncate(self.log, self._read_bytes + len(whole))
        self._read_bytes += len(whole)
        for line in whole.decode().splitlines():
            sign, number = line.split()
            idx = int(number)
            if sign == "!":
                self.wrong.append(line)
            elif sign == "?":
                self.gone.discard(idx)
                self._asked.add(idx)
            elif sign == "+":
                self.num_written += 1
                self._asked.discard(idx)
                self.note_written(idx)
            elif sign == "-":
                self.there.discard(idx)
                self.leaving.add(idx)
            elif idx in self.leaving:
                self.leaving.discard(idx)
                self.gone.add(idx)
        self.begun |= self._asked
        self._asked.clear()

    def note_written(self, idx: int) -> None:
        self.gone.discard(idx)
        self.leaving.discard(idx)
        self.there |= {idx} if idx < NUM_PINNED else set()


def run_and_kill(path: Path, log: Path, seed: int, rng: random.Random) -> None:
    """Kill a writer: at work, or one in five while it starts."""
    writer = subprocess.Popen(
        [sys.executable, killed_writer.__file__, str(path), str(log), str(seed)],
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        assert writer.stdout is not None
        if seed % 5 != 4:
            assert writer.stdout.readline() == "open\n"
            time.sleep(rng.uniform(0.002, 0.2))
        else:
            time.sleep(rng.uniform(0.1, 0.6))
        assert writer.poll() is None, "it was to run until it is killed"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()


def check_everything(place: DiskPlace, known: Known, *, journal: bool) -> set[int]:
    """What lies there is right, and what must be there is; returns what is there."""
    driver = place.open(capacity_bytes=CAPACITY_BYTES, num_threads=2)
    place.check_books()
    present = {idx for idx, here in enumerate(driver.present(KEYS)) if here}
    assert known.there <= present, "what was reported as written was lost"
    gone = known.gone if journal else known.gone - known.begun
    assert not gone & present, "what was deleted is back"
    served, wrong = set(), {}
    for idx in sorted(present):
        result, (content,) = driver.read([KEYS[idx]], size_of(idx))
        if result.done:
            assert content == payload_of(KEYS[idx], size_of(idx))
            served.add(idx)
        else:
            assert result.results[0].outcome is Outcome.MISS
            wrong[idx] = result.results[0].reason
    assert known.there <= served
    # A SIGKILL is no power cut: what the journal names is whole, unless it was being wiped. By
    # the headers, a record whose write was cut off is found as well.
    if journal:
        assert wrong == dict.fromkeys(known.leaving & wrong.keys(), Reason.HEADER)
    else:
        assert set(wrong.values()) <= {Reason.CHECKSUM}
    place.check_books()
    return served


def test_nothing_is_lost_but_what_was_in_flight(place: DiskPlace, tmp_path: Path) -> None:
    """Killed again and again on one directory, which is left with its journal or without.

    Never a wrong byte; every chunk that was reported as written, and not deleted since, is there,
    if a lease kept it from being evicted; no deleted chunk is back; no slot is lost.
    """
    rng = random.Random(2)
    known = Known(tmp_path / "said")
    largest = 0
    for seed in range(KILLS):
        run_and_kill(place.path, known.log, seed, rng)
        known.read_on()
        assert known.wrong == [], "a wrong byte was served"
        journal = seed % 4 != 3
        if not journal:
            place.journal.unlink(missing_ok=True)
        served = check_everything(place, known, journal=journal)
        largest = max(largest, len(served))
        # It goes on.
        driver = place.open(capacity_bytes=CAPACITY_BYTES, num_threads=2)
        with place.context.leases.acquire(KEYS[:NUM_PINNED], 60.0):
            for idx in rng.sample(range(NUM_KEYS), 5):
                (result,) = driver.write([KEYS[idx]], size_of(idx))
                assert result.outcome in (Outcome.DONE, Outcome.FULL)
                if result.outcome is Outcome.DONE:
                    known.note_written(idx)
                    assert driver.read([KEYS[idx]], size_of(idx))[0].done
        place.check_books()
        place.close()
    assert known.num_written > 20 * KILLS
    assert largest > NUM_PINNED // 2
