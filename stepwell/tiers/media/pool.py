"""One process as a member of a pool: what it may write, and its part in sweeping."""

import contextlib
import logging
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from os import getpid

from stepwell.errors import ConfigError, in_one_line
from stepwell.tiers.errnos import GONE, NO_ROOM_LEFT
from stepwell.tiers.media.marker import read_pool_id
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.quota import Member
from stepwell.tiers.media.sweep import (
    GONE_AFTER_S,
    LeaseWatch,
    PoolLimits,
    Sweeper,
    elect,
)

__all__ = ["Pool"]

logger = logging.getLogger(__name__)

# How often a member looks: one that waits for a grant or makes room, one that sweeps, any other.
_BUSY_S, _SWEEP_S, _IDLE_S = 0.05, 0.2, 1.0
_READS = 400  # small files that a sweeper reads in a second, or little more
_PULSE_S = 2.0
# What it was granted is good for so long after it has heard of it: whoever is taken for gone, which
# is later, must have stopped by then, and what it did not use is granted to others.
_SILENT_S = GONE_AFTER_S / 3
_WAIT_FOR_GRANT_S = 2.0
_CLOSE_WAIT_S = 5.0
_LOG_EVERY_S = 60.0
_LEAST_UNIT_BYTES, _MOST_UNIT_BYTES = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class _Clock:
    """The file system's clock: what it said, and when that was, nanoseconds."""

    said_ns: int
    at_ns: int

    @property
    def now_ns(self) -> int:
        return self.said_ns + time.monotonic_ns() - self.at_ns


class Pool:
    """A member of a pool.

    Threading: any thread; it has one of its own, which ends with `close` and with nothing else.
    No lock is held while the file system is asked.

    Args:
        files: of a pool that is there.
        limits: of all that use it together.

    Raises:
        ConfigError: the pool is of another version. OSError: it cannot be joined.
    """

    def __init__(self, files: PoolFiles, limits: PoolLimits) -> None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
        self.member_id = f"{host}-{getpid()}-{secrets.token_hex(8)}"
        self.num_failures = 0
        """Of its thread's beats."""
        self._failure = ""  # of the last beat
        self._files = files
        self._limits = limits
        # What is asked for beforehand, so that a writer seldom waits.
        unit_bytes = min(max(limits.capacity_bytes // 256, _LEAST_UNIT_BYTES), _MOST_UNIT_BYTES)
        self._unit_bytes = min(unit_bytes, limits.capacity_bytes // 16)
        self._lock = threading.Lock()
        self._asked = threading.Condition(self._lock)
        self._granted = threading.Condition(self._lock)
        self._written_bytes = self._reserved_bytes = 0
        self._granted_bytes = self._wanted_bytes = 0
        self._num_refused = 0
        self._was_too_large = False
        self._heard_s = -_SILENT_S
        self._used_bytes: int | None = None
        self._published: Member | None = None
        self._published_s = self._looked_s = -_PULSE_S
        self._beat_s = 0.0
        self._logged_s = -_LOG_EVERY_S
        self._watch = LeaseWatch()
        self._sweeper: Sweeper | None = None
        self._closed = False
        self._pool_id = read_pool_id(files.path)
        files.make_folders()
        self._clock = _Clock(time.time_ns(), time.monotonic_ns())
        with contextlib.suppress(OSError):  # on a full file system; it is tried again
            self._publish()
        self._thread = threading.Thread(target=self._run, name="stepwell-pool", daemon=True)
        self._thread.start()

    # Writing.

    def reserve(self, num_bytes: int, within_s: float) -> bool:
        """Whether so much may be written now; waits for a grant, 2 s at most."""
        if self.is_too_large(num_bytes):
            return False
        give_up_s = time.monotonic() + min(within_s, _WAIT_FOR_GRANT_S)
        with self._lock:
            while not self._closed:
                needed_bytes = self._written_bytes + self._reserved_bytes + num_bytes
                # Asked for in time, and not for every record.
                if self._granted_bytes < needed_bytes + self._unit_bytes // 2:
                    wanted_bytes = needed_bytes + self._unit_bytes
                    if self._wanted_bytes < wanted_bytes:
                        self._wanted_bytes = wanted_bytes
                        self._asked.notify()
                if needed_bytes <= self._granted_bytes and self._has_heard():
                    self._reserved_bytes += num_bytes
                    return True
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    break
                self._granted.wait(left_s)
            # What was wanted and not had is not wanted for ever.
            self._wanted_bytes = self._written_bytes + self._reserved_bytes
            return False

    def settle(self, num_bytes: int, *, written: bool, refused: bool = False) -> None:
        """What was reserved was written, or was not: if so, because there was no room for it."""
        with self._lock:
            self._reserved_bytes -= num_bytes
            self._written_bytes += num_bytes * written
            self._num_refused += refused
            if refused:
                self._asked.notify()

    def is_too_large(self, num_bytes: int) -> bool:
        """Whether a record will never be written, as it is more than a quarter of the capacity."""
        if num_bytes <= self._limits.capacity_bytes // 4:
            return False
        with self._lock:
            is_first, self._was_too_large = not self._was_too_large, True
        if is_first:
            logger.warning(
                "a record is more than a quarter of the capacity and is not written; this is said "
                "once: path=%s record=%dB capacity=%dB",
                self._files.path, num_bytes, self._limits.capacity_bytes,
            )  # fmt: skip
        return True

    def _has_heard(self) -> bool:
        return time.clock_gettime(time.CLOCK_BOOTTIME) < self._heard_s + _SILENT_S

    # Knowing.

    def now_ns(self) -> int:
        """The present by the file system's clock, nanoseconds since the epoch.

        Whatever becomes of this host's own: it is not looked at after the start.
        """
        return self._clock.now_ns

    @property
    def trouble(self) -> str:
        """Why nothing may be written, other than that there is no room; "" if it may."""
        if self._failure or self._has_heard():
            return self._failure
        return "nobody grants anything; does another user's engine sweep it, or none at all?"

    def used_bytes(self) -> int | None:
        """The most that lies in the pool, as whoever sweeps has said last; None if nobody did."""
        return self._used_bytes

    def close(self) -> None:
        """Leave the pool; another takes over the sweeping at once.

        A file system that hangs is not waited for.
        """
        with self._lock:
            self._closed = True
            self._asked.notify_all()
            self._granted.notify_all()
        self._thread.join(_CLOSE_WAIT_S)
        if self._thread.is_alive():
            logger.warning("the pool does not answer and is left: path=%s", self._files.path)

    # The thread.

    def _run(self) -> None:
        while self._waited():
            try:
                self._beat()
                self._failure = ""
            except Exception as error:  # counted, and the next beat is another chance: a pool
                self._on_failure(error)  # whose sweeper ends silently is full for ever
        self._leave()

    def _waited(self) -> bool:
        """Until it is time for the next beat; False once closed."""
        sweeper = self._sweeper
        # Every beat of a sweeper reads what each member says.
        least_s = _BUSY_S / 2 if sweeper is None else max(_BUSY_S / 2, sweeper.num_members / _READS)
        with self._lock:
            if self._wanted_bytes > self._granted_bytes or (sweeper and sweeper.busy):
                pause_s = _BUSY_S
            else:
                pause_s = _SWEEP_S if sweeper else _IDLE_S
            if not self._closed:
                self._asked.wait(max(pause_s, least_s))
            closed = self._closed
        # Somebody who writes may ask at any time.
        left_s = self._beat_s + least_s - time.monotonic()
        if left_s > 0 and not closed:
            time.sleep(left_s)
        self._beat_s = time.monotonic()
        return not closed

    def _on_failure(self, error: Exception) -> None:
        self.num_failures += 1
        self._failure = in_one_line(error)
        self._looked_s = -_PULSE_S  # whether it still is the pool
        if not isinstance(error, OSError | ConfigError):
            self._sweeper = None  # whatever it is, another begins anew
        now_s = time.monotonic()
        if now_s >= self._logged_s + _LOG_EVERY_S:
            self._logged_s = now_s
            logger.warning(
                "the pool fails: path=%s failures=%d error=%s",
                self._files.path, self.num_failures, self._failure,
                exc_info=not isinstance(error, OSError | ConfigError),
            )  # fmt: skip

    def _beat(self) -> None:
        is_full = False
        try:
            self._publish()
        except OSError as error:
            if error.errno not in NO_ROOM_LEFT:
                raise
            is_full = True
            self._clock = _Clock(self._files.pulse(self.member_id), time.monotonic_ns())
            self._published_s = time.monotonic()
        heard_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._sweeper is None:
            self._sweeper = elect(
                self._files, self.member_id, self._limits, self._watch, self.now_ns()
            )
        if self._sweeper is not None and not self._sweeper.step(self.now_ns(), is_full=is_full):
            self._sweeper = None
        self._listen(heard_s)

    def _publish(self) -> None:
        says = self._says()
        now_s = time.monotonic()
        is_due = now_s >= self._published_s + _PULSE_S
        if is_due or now_s >= self._looked_s + _PULSE_S:
            self._look()
            self._looked_s = now_s
        if says == self._published and not is_due:
            return
        self._published_s = now_s
        said_ns = self._files.write_member(self.member_id, says)
        self._clock = _Clock(said_ns, time.monotonic_ns())
        self._published = says

    def _says(self, *, has_left: bool = False) -> Member:
        with self._lock:
            return Member(
                # What is being written when it leaves may be there some day.
                self._written_bytes + (self._reserved_bytes if has_left else 0),
                self._wanted_bytes,
                self._num_refused,
                self._limits.capacity_bytes,
                has_left,
            )

    def _look(self) -> None:
        """Whether this still is the pool, and all of it.

        Where its file system is not mounted any more, nothing must be made.
        """
        try:
            is_same = read_pool_id(self._files.path) == self._pool_id
        except ConfigError:  # damaged, or of another version
            self._deny()
            raise
        except OSError as error:
            if error.errno in GONE:
                self._deny()
            raise
        if not is_same:
            self._deny()
            raise ConfigError(
                "another pool lies there now. Is the right file system mounted? If this one is "
                f"meant, start the engine again: path={self._files.path}"
            )
        self._files.make_folders()
        with contextlib.suppress(OSError):  # without room; what was prepared before will do
            self._files.prepare(self.member_id)

    def _deny(self) -> None:
        with self._lock:
            self._granted_bytes = 0

    def _listen(self, heard_s: float) -> None:
        books = self._files.read_books(self._files.highest_epoch())
        if books is None or self.member_id not in books.granted:
            return
        with self._lock:
            self._used_bytes = books.quota.used_bytes
            self._granted_bytes = books.granted[self.member_id]
            self._heard_s = heard_s
            self._granted.notify_all()

    def _leave(self) -> None:
        """Say what it wrote to the last byte, for that is charged until it is counted.

        One by one: whoever fails to write a file can still let another sweep at once.
        """
        with contextlib.suppress(OSError, ConfigError):
            if read_pool_id(self._files.path) == self._pool_id:
                self._files.write_member(self.member_id, self._says(has_left=True))
        with contextlib.suppress(OSError):
            self._files.remove_prepared(self.member_id)
        if self._sweeper is not None:
            self._sweeper.resign()
