"""Jobs, results and outcomes: the values that tiers and the store exchange.

The life of a job::

    submitted -> running -> reported by poll(), exactly once, with one result per chunk

Between submit and the poll that reports it, a job's buffers belong to the tier: for a write
nobody may change them, for a read nobody may look at them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from stepwell.core.keys import Key

__all__ = ["Chunk", "ChunkResult", "Direction", "Job", "JobResult", "Lookup", "Outcome", "Reason"]


class Lookup(Enum):
    """The answer to "do you have this chunk?"; asking changes nothing."""

    HIT = "hit"
    PENDING = "pending"
    """Being written by this tier; ask again."""
    UNKNOWN = "unknown"
    """The tier is finding out; ask again. Only of tiers that others change as well."""
    MISS = "miss"


class Outcome(StrEnum):
    """What became of one chunk of a job."""

    DONE = "done"
    MISS = "miss"
    """Read: not there, or not trustworthy; the buffer's content is undefined."""
    FULL = "full"
    """Write: refused, a bound would not have been kept."""
    FAILED = "failed"
    """The medium failed."""


class Reason(StrEnum):
    """Why a chunk was not served or not taken. The values are metric labels and stay stable."""

    NONE = ""
    # Reads.
    ABSENT = "absent"
    VANISHED = "vanished"
    CHECKSUM = "checksum"
    HEADER = "header"
    IDENTITY = "identity"
    TRUNCATED = "truncated"
    LAYOUT = "layout"
    """Of another length than was asked for. A key names the layout too, so the record is as wrong
    as any, and is set aside."""
    NOT_A_FILE = "not_a_file"
    EXPIRED = "expired"
    NOT_WORTH = "not_worth"
    """There, but computing it was expected to end sooner than reading it."""
    UNREAD = "unread"
    """There, but the engine never had it read: no room in the primary, cancelled, not needed."""
    # Writes.
    CAPACITY = "capacity"
    MIN_FREE = "min_free"
    NO_SPACE = "no_space"
    QUEUE_FULL = "queue_full"
    NOT_ADMITTED = "not_admitted"
    """Not worth a write: see `stepwell.policy.admission`."""
    EXISTS = "exists"
    """DONE without moving a byte: the chunk was there already, or another job wrote it."""
    # Both.
    INTERNAL = "internal"
    DEADLINE = "deadline"
    IO_ERROR = "io_error"
    BREAKER = "breaker"
    """The tier failed or was slow lately and is not asked for a while."""
    CLOSED = "closed"


class Direction(StrEnum):
    """READ fills the job's buffers from a tier, WRITE takes them down, TOUCH moves no bytes."""

    READ = "read"
    WRITE = "write"
    TOUCH = "touch"
    """Make chunks recent, so that they leave later; buffers are empty."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a job.

    Attributes:
        key: its full name.
        buffer: contiguous bytes, exactly the payload's length; writable for a read. Reads and
            writes move without a copy when the address and the length are multiples of 4096.
        end_token: position of the chunk's last token + 1 in its prefix, 0 if unknown.
        expires_at_s: for a write, when the chunk expires, seconds since the epoch; 0: as long
            from now as the tier keeps what is new.
    """

    key: Key
    buffer: memoryview
    end_token: int = 0
    expires_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """Chunks that move together: consecutive pieces of a prefix, first piece first.

    Attributes:
        job_id: chosen by the caller, unique among the caller's unreported jobs.
        direction: READ, WRITE or TOUCH.
        chunks: at least one.
        deadline_s: seconds from submission after which chunks that have not begun are given up
            (MISS or FULL with Reason.DEADLINE). A system call that has begun is waited for.
        copying: the store copies from tier to tier for its own purposes; nobody uses the chunks,
            so they do not become recent by it.
    """

    job_id: int
    direction: Direction
    chunks: Sequence[Chunk]
    deadline_s: float = 10.0
    copying: bool = False


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of one chunk, and why if not DONE.

    Attributes:
        outcome: what became of it.
        reason: why, if not DONE.
        expires_at_s: of a chunk that was read, when it expires; 0 for never. Not compared.
    """

    outcome: Outcome
    reason: Reason = Reason.NONE
    expires_at_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class JobResult:
    """A finished job.

    Attributes:
        results: one per chunk, in the job's order.
        moved_bytes: payload bytes that were read or written.
        elapsed_s: from submission to the last chunk's end.
        tiers: name of the tier that served each chunk of a read ("" where none did).
        slowest_s: the longest that a single operation of the job took, without waiting for a
            turn; 0 if none ran, or if the tier does not measure it.
    """

    job_id: int
    direction: Direction
    results: tuple[ChunkResult, ...]
    moved_bytes: int
    elapsed_s: float
    tiers: tuple[str, ...] = field(default=())
    slowest_s: float = 0.0

    @property
    def done(self) -> bool:
        """Whether every chunk is DONE."""
        return all(result.outcome is Outcome.DONE for result in self.results)
