"""One drive of the disk tier: its directory, extents, books and journal, from start to end.

What lies where is decided by `stepwell.tiers.ledger`; here it is done. `stepwell.tiers.disk` moves
records to and from what this gives it.
"""

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from stepwell.core.keys import Root
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError
from stepwell.policy.endurance import EnduranceGovernor, EnduranceState
from stepwell.policy.eviction import make_policy
from stepwell.settings import format_bytes
from stepwell.tiers.base import TierContext
from stepwell.tiers.blockio import probe_direct
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.extents import ExtentFiles, out_of_space
from stepwell.tiers.files import read_regular
from stepwell.tiers.frames import (
    SNAPSHOT_BASE_BYTES,
    SNAPSHOT_SLOT_BYTES,
    Image,
    JournalError,
    encode_wear,
    replay,
)
from stepwell.tiers.journal import Journal
from stepwell.tiers.ledger import Drop, Evicted, Full, Got, Grow, Ledger
from stepwell.tiers.outcomes import FAILED, NO_ROOM
from stepwell.tiers.slots import BOOKKEEPING_BYTES, Extent

__all__ = ["Drive"]

logger = logging.getLogger(__name__)

# After a drive would not give more space it is not asked again for so long.
_GROW_AGAIN_S = 1.0
_NO_LIMIT_BYTES = 1 << 62
# How often it is looked whether somebody has removed extents.
_LOOK_EVERY_S = 1.0
# An engine may be stopped without a word: so much of what it wrote is then not known of.
_WEAR_EVERY_BYTES = 64 << 10


class Drive:
    """A directory that this process owns, and the extents in it.

    Threading: any thread. I/O is done under no lock but two, and nobody who only asks takes them:
    the one that keeps several threads from making room at once, and the journal's own.

    Args:
        path: absolute; created if missing; owned by one process at a time.
        capacity_bytes: what extents and journal may take together.
        context: shared by the store's tiers.
        min_free_bytes: free space that is left on the file system, whoever uses it up.
        policy: name of the eviction policy.
        drive_writes_per_day: what may be written per day, in sizes of the drive; 0: no limit.
        on_evicted: told why, and by its fingerprint, a chunk left to make room; on any thread,
            under a lock, so it does next to nothing.

    Raises:
        ConfigError: the path cannot be used, or the capacity does not fit the file system.

    Attributes:
        path: as given.
        ledger: what lies where.
        files: the extents.
        direct: whether reads and writes go past the page cache.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        context: TierContext,
        *,
        min_free_bytes: int,
        policy: str,
        drive_writes_per_day: float,
        on_evicted: Callable[[Evicted, int], object],
    ) -> None:
        self.path = path
        self._context = context
        self._min_free_bytes = min_free_bytes
        self._drive_writes_per_day = drive_writes_per_day
        self._room_lock = threading.Lock()
        self._grow_again_s = 0.0
        self._grow_failed = False
        self._shrunk_s = 0.0
        self._looked_s = 0.0
        self._renew_again_s = 0.0
        self._described: set[Root] = set()
        self._metrics_target = ""
        self._wear_lock = threading.Lock()
        self._wear_seen_bytes = 0
        self._wear_noted_bytes = 0
        _check_size(path, capacity_bytes, min_free_bytes)  # before anything is created
        self._directory = StoreDirectory(path)
        self._directory.open()
        # Or the next try would be refused by this very process.
        with contextlib.ExitStack() as undo:
            undo.callback(self._directory.close)
            try:
                self.direct = probe_direct(self._directory.partial)
                self.files = ExtentFiles(self._directory, direct=self.direct)
                undo.callback(self.files.close)
                journal = Journal(self._directory.journal, self._directory.partial_path())
                undo.callback(journal.close)
                self.ledger = Ledger(
                    capacity_bytes,
                    make_policy(policy),
                    context.leases.held_tag,
                    journal,
                    on_evicted,
                )
                self._adopt()
            except OSError as error:
                raise ConfigError(
                    f"path cannot be written ({error.strerror}): path={path}"
                ) from error
            undo.pop_all()
        if not self.direct:
            logger.warning(
                "O_DIRECT does not work here, going through the page cache: path=%s",
                path,
            )

    def close(self) -> None:
        """Write down what is known, and give up the directory. Nobody reads or writes any more."""
        if self._directory.owned():
            self._note_wear()
            self.ledger.journal.close()
        else:
            self.ledger.journal.abandon()
        self.files.close()
        self._directory.close()

    @property
    def wear(self) -> EnduranceState:
        """Bytes written to the drive since the store was made, and what is left of the budget."""
        with self._wear_lock:
            now_s = self._context.wall_s()
            written_bytes = self.files.written_bytes + self.ledger.journal.written_bytes
            self._governor.on_written(written_bytes - self._wear_seen_bytes, now_s)
            self._wear_seen_bytes = written_bytes
            return self._governor.state(now_s)

    @property
    def pressure(self) -> float:
        """How scarce writing is by the drive's endurance: 0, not at all, to 1, not to be done."""
        if not self._drive_writes_per_day:
            return 0.0
        self.wear  # noqa: B018 - looks at what was written since
        with self._wear_lock:
            return self._governor.pressure(self._context.wall_s())

    def note_metrics(self, target: str) -> None:
        """Say in the directory where this process exports its counters, for `stepwell inspect`."""
        self._metrics_target = target
        self._directory.note_metrics(target)

    # Starting.

    def _adopt(self) -> None:
        extents = []
        for found in self._directory.find_extents():
            num_slots = self.files.adopt(found)
            if num_slots:
                extents.append(
                    self.ledger.adopt_extent(found.extent_id, found.slot_bytes, num_slots)
                )
        image = self._read_journal()
        known = image is not None
        if image is None:
            now_s = self._context.wall_s()
            image = Ledger.image_of(self.files.headers(extents), now_s)
        self._governor = EnduranceGovernor(
            self.files.drive_bytes(),
            self._drive_writes_per_day,
            self._context.wall_s(),
            state=image.wear,
        )
        complete = self.ledger.load(image, self._directory.last_extent_id())
        for root in self._directory.identities().keys() - self.ledger.roots():
            self._directory.forget(root)
        if not (known and complete and self.ledger.journal.resume(image)):
            self._renew_journal()
        num_chunks = len(self.ledger)
        self._reduce(self.ledger.capacity_bytes, Evicted.CAPACITY)  # it may have been lowered
        if len(self.ledger) < num_chunks:
            logger.warning(
                "the capacity is lower than before, chunks were evicted: path=%s capacity=%s "
                "chunks=%d left=%d",
                self.path,
                format_bytes(self.ledger.capacity_bytes),
                num_chunks,
                len(self.ledger),
            )
        self.flush_journal()
        del image
        _return_memory()

    def _read_journal(self) -> Image | None:
        """What the journal says; None where only the headers can tell."""
        try:
            return replay(read_regular(self._directory.journal))
        except FileNotFoundError:
            return None
        except (OSError, JournalError) as error:
            logger.warning(
                "the journal cannot be used, reading every header instead: path=%s error=%s",
                self._directory.journal,
                error,
            )
            return None

    # Minding.

    def mind_before_write(self, roots: set[Root]) -> ChunkResult | None:
        """What has to be right before something is written; returns why it is not.

        Args:
            roots: whose chunks are about to be written.
        """
        try:
            self._mind_ownership()
        except OSError as error:
            logger.warning("a write failed: path=%s error=%s", self.path, error)
            return FAILED
        self._mind_files()
        self._mind_free_space()
        for root in roots:
            self._describe(root)
        return None

    def settle(self) -> None:
        """Loose ends after a piece of work, and the journal."""
        journal = self.ledger.journal
        wear_due = self.files.written_bytes - self._wear_noted_bytes > _WEAR_EVERY_BYTES
        renewal_due = journal.broken or journal.long(len(self.ledger))
        if not (self.ledger.loose_ends or journal.noted or wear_due or renewal_due):
            return  # as after most reads
        if not self._directory.owned():
            journal.abandon()  # it may be somebody else's by now
            return
        stale = self.ledger.take_stale()
        for place in stale:
            with contextlib.suppress(OSError):  # then it is only the journal that knows
                self.files.wipe(place, self.ledger.size_at(place))
        self.ledger.give_back(stale)
        self._drop_unused()
        if wear_due:
            self._note_wear()
        self.flush_journal()
        if journal.broken or journal.long(len(self.ledger)):
            self._renew_journal()

    def _note_wear(self) -> None:
        self._wear_noted_bytes = self.files.written_bytes
        frame = encode_wear(self.wear)
        with self.ledger.lock:
            self.ledger.journal.note(frame, 1)

    def discard(self, rows: Sequence[int]) -> None:
        """Rows that were removed: wipe what lies there, then free their slots."""
        owned = bool(rows) and self._directory.owned()  # else the slots may be somebody else's
        if owned:
            # First of all, or a kill in between would leave entries of records that are not there.
            self.ledger.note_gone(rows)
            self.flush_journal()
        for row in rows:
            place = self.ledger.place(row)
            if owned:
                with contextlib.suppress(OSError):  # the journal knows it too
                    self.files.wipe(place, self.ledger.size_at(place))
            self.ledger.discarded(row)

    def _describe(self, root: Root) -> None:
        identity = self._context.registry.get(root)
        if root in self._described or identity is None:
            return
        with contextlib.suppress(OSError):  # it is for people; a store without it works
            self._directory.describe(root, identity)
            self._described.add(root)

    def _mind_ownership(self) -> None:
        """Begin anew where somebody removed the store while it was in use.

        Where only LOCK was removed nobody else has owned the store since, and it is kept. What
        others have put in its place is left to them, and to the next start.

        Raises:
            OSError: another process owns it by now, or left extents there; or it cannot be made.
        """
        if self._directory.owned():
            return
        with self._room_lock:
            if self._directory.owned():
                return
            found = {each.extent_id for each in self._directory.find_extents()}
            ours = self.files.extent_ids - self.files.lost()
            if found - ours:
                raise OSError(
                    errno.EBUSY, "another store was put in its place; start again to use it"
                )
            only_lock = not self._directory.has_lock() and ours == self.files.extent_ids
            try:
                self._directory.close()
                self._directory.open()
                self._directory.note_metrics(self._metrics_target)
            except ConfigError as error:
                raise OSError(errno.EBUSY, str(error)) from error
            self._described.clear()
            # Frames were dropped, and what lies there may be of an owner in between. Without an
            # open file, none is left should the new one fail.
            self.ledger.journal.abandon()
            self._renew_again_s = 0.0
            if only_lock:
                logger.warning("LOCK was removed and made again: path=%s", self._directory.path)
            else:
                logger.warning(
                    "the store was removed, beginning anew: path=%s", self._directory.path
                )
                self.ledger.forget()
                self._drop_unused()
            self._renew_journal()

    def _mind_files(self) -> None:
        """Notice what somebody removed or replaced, which the next start would not find."""
        now_s = self._context.clock.monotonic()
        if now_s < self._looked_s + _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        if not self.ledger.journal.in_place():
            self._renew_journal()
        lost = self.ledger.forget(self.files.reopen(self.files.lost()))
        if lost:
            logger.warning(
                "extents were removed, what lay in them is lost: path=%s extents=%d",
                self._directory.path,
                len(lost),
            )
            self._drop_unused()

    def _drop_unused(self) -> None:
        for extent in self.ledger.take_unused():
            self._drop(extent)

    # Room.

    def find_room(self, slot_bytes: int, count: int) -> tuple[list[int], ChunkResult]:
        """Up to ``count`` slots, and what to say of those that are missing."""
        if not self.ledger.fits(slot_bytes):
            return [], NO_ROOM
        places = self.ledger.free_slots(slot_bytes, count)
        if places:
            return places, NO_ROOM
        if self._grow_failed and self._context.clock.monotonic() < self._grow_again_s:
            # Or good chunks would leave for a drive that takes nothing.
            return [], FAILED
        # One at a time, or several would evict and grow for the same wish.
        with self._room_lock:
            while True:
                step = self.ledger.allot(slot_bytes, count, self._growth_bytes())
                match step:
                    case Got(places):
                        return places, NO_ROOM
                    case Full(places):
                        return places, self._refusal(slot_bytes)
                    case Grow(extent):
                        failure = self._grow(extent)
                        if failure is not None:
                            return [], failure
                    case Drop(extent):
                        if not self._drop(extent):
                            return [], FAILED

    def _refusal(self, slot_bytes: int) -> ChunkResult:
        """Why there is no room: what the capacity would allow, the drive did not."""
        free_capacity_bytes = self.ledger.capacity_bytes - self.ledger.allocated_bytes
        if free_capacity_bytes < slot_bytes + BOOKKEEPING_BYTES:
            return NO_ROOM
        waits = self._context.clock.monotonic() < self._grow_again_s
        return ChunkResult(Outcome.FULL, Reason.NO_SPACE if waits else Reason.MIN_FREE)

    def _growth_bytes(self) -> int:
        """What a new extent may take of the drive at present."""
        if self._context.clock.monotonic() < self._grow_again_s:
            return 0
        try:
            return max(0, self.files.free_bytes() - self._min_free_bytes)
        except OSError:
            return 0  # the next write will say what is wrong

    def _drop(self, extent: Extent) -> bool:
        self.flush_journal()  # that what lay there has left
        gone = self.files.drop(extent)
        self.ledger.dropped(extent, gone=gone)
        self.flush_journal()  # it may take less now
        return gone

    def _grow(self, extent: Extent) -> ChunkResult | None:
        """Make a planned extent; returns what to say of the chunks if the drive failed."""
        made = False
        try:
            self.files.make(extent)
            made = True
        except OSError as error:
            self._grow_again_s = self._context.clock.monotonic() + _GROW_AGAIN_S
            self._grow_failed = not out_of_space(error)
            if self._grow_failed:
                logger.warning("a write failed: path=%s error=%s", self._directory.path, error)
                return FAILED
        finally:
            self.ledger.grown(extent, made=made)
        return None

    def _mind_free_space(self) -> None:
        """Give space back where others have used up what was to stay free."""
        if not self._min_free_bytes:
            return
        with contextlib.suppress(OSError):
            if self.files.free_bytes() >= self._min_free_bytes:
                return
        with contextlib.suppress(OSError), self._room_lock:
            now_s = self._context.clock.monotonic()
            missing_bytes = self._min_free_bytes - self.files.free_bytes()
            # Giving back must help, or the cache would be emptied for nothing; and some file
            # systems free space a little later.
            if 0 < missing_bytes <= self.ledger.allocated_bytes and now_s >= self._shrunk_s:
                self._shrunk_s = now_s + _GROW_AGAIN_S
                aim_bytes = self.ledger.allocated_bytes - missing_bytes
                self._reduce(aim_bytes, Evicted.MIN_FREE)

    def _reduce(self, allocated_bytes: int, why: Evicted) -> None:
        """Bring the extents down to a size, the chunks that would leave first at first."""
        for clear in (False, True):
            while step := self.ledger.shrink(allocated_bytes, why, clear=clear):
                if isinstance(step, Drop) and not self._drop(step.extent):
                    return
            self.flush_journal()
            while cut := self.ledger.trim(allocated_bytes):
                if not self.files.shorten(cut[0]):
                    self.ledger.untrim(*cut)
                    return

    # The journal.

    def flush_journal(self) -> None:
        """What was noted is in the journal afterwards, in as many bytes as are set aside for it;
        where that cannot be there is no journal, so that the next start looks at the headers.
        """
        journal = self.ledger.journal
        if journal.noted and not self._directory.owned():
            journal.abandon()  # it may be somebody else's by now
            return
        num_slots = self.ledger.num_slots
        # There has to be room for the next one beside it while that is made.
        most_bytes = num_slots * (BOOKKEEPING_BYTES - SNAPSHOT_SLOT_BYTES) - SNAPSHOT_BASE_BYTES
        within = journal.flush(most_bytes if num_slots else _NO_LIMIT_BYTES)
        if not within and not self._renew_journal():
            journal.give_up()

    def _renew_journal(self) -> bool:
        """A new snapshot; after one that could not be written, not at once again."""
        now_s = self._context.clock.monotonic()
        if now_s < self._renew_again_s or not self._directory.owned():
            return False
        with contextlib.suppress(OSError):
            self._directory.make_folders()  # somebody may have removed the one it is made in
        if os.path.isdir(self._directory.journal):
            with contextlib.suppress(OSError):  # a file cannot take its place
                self._directory.set_aside(self._directory.journal)
        ledger, wear = self.ledger, self.wear
        renewed = ledger.journal.renew(ledger.lock, lambda: ledger.snapshot(wear))
        if not renewed:
            self._renew_again_s = now_s + _GROW_AGAIN_S
        return renewed


def _return_memory() -> None:
    """Give what starting took back to the system.

    The C library keeps it otherwise: 330 resident bytes per chunk were measured instead of 170.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def _check_size(path: Path, capacity_bytes: int, min_free_bytes: int) -> None:
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        status = os.statvfs(existing)
    except OSError:
        return  # opening will say what is wrong
    total_bytes = status.f_blocks * status.f_frsize
    # /proc and the like have no size; opening will say what is wrong with those.
    if 0 < total_bytes < capacity_bytes + min_free_bytes:
        raise ConfigError(
            f"capacity and min_free together are larger than the file system "
            f"({format_bytes(total_bytes)}): path={path} "
            f"capacity={format_bytes(capacity_bytes)} min_free={format_bytes(min_free_bytes)}"
        )
