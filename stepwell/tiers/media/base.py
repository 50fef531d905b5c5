"""A medium: storage that several engines share, reduced to what a tier asks of it.

A medium moves records by their keys and says what happened. It neither verifies a record nor
remembers which there are, and knows no job; `stepwell.tiers.shared` does all that, once for every
kind. What a kind needs for itself, as threads or a sweeper of a shared directory, is its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepwell.core.keys import Key, Root
from stepwell.core.types import ChunkResult

__all__ = ["Medium", "Page", "Promises", "Stats", "Wanted", "Record"]

Page = memoryview | bytes
"""A record's header as it was found: 4096 bytes."""


@dataclass(frozen=True, slots=True)
class Promises:
    """What a kind of medium promises, whatever the deployment.

    Attributes:
        durable: what was written is there after the server or the machine was restarted.
        shared: engines on other machines see it.
        expires: the medium itself removes what has expired.
        evicts: who makes room: "stepwell", "server", "nobody".
    """

    durable: bool
    shared: bool
    expires: bool
    evicts: str


@dataclass(frozen=True, slots=True)
class Stats:
    """What a medium says of itself; None where it does not say.

    Attributes:
        num_chunks: of all roots.
        used_bytes: that those take.
        capacity_bytes: the most that they may take.
    """

    num_chunks: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A record to be read.

    Attributes:
        key: its name.
        payload: where its payload goes, exactly as long as that; undefined unless it is found.
    """

    key: Key
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """A record to be written.

    Attributes:
        key: its name.
        header: 4096 bytes.
        payload: not to be changed.
        expires_at_s: when it may be removed, seconds since the epoch; 0 for never.
    """

    key: Key
    header: bytes
    payload: memoryview
    expires_at_s: float


class Medium(Protocol):
    """One place of one kind.

    Threading: any number of threads call at once. Every call but `close` may block, for
        ``within_s`` seconds and little more, whatever the other side does.
    Ownership: buffers belong to the caller again when the call has returned or raised. A medium
        whose library may still write to one then must read into memory of its own.
    Errors: TierError where the medium failed or did not answer in time; then nothing is known of
        any of the records of the call, and the caller treats them as not read or not written.
    """

    def check(self) -> None:
        """Ask the other side whether it is there and takes us; before anything else, or not at all.

        Raises:
            ConfigError: it refuses us, and will go on to do so. TierError: it does not answer.
        """
        ...

    def exist(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """For each key whether there is a record, as far as the medium knows."""
        ...

    def read(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | ChunkResult]:
        """Read records.

        Returns:
            For each the header's page, not verified, and its payload is in place; or a result
            that is not DONE: (MISS, ABSENT), (MISS, TRUNCATED), (MISS, LAYOUT), or FAILED.
        """
        ...

    def write(self, records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        """Write records that are not there; a key's record never changes.

        Returns:
            DONE, DONE with EXISTS where there was one, FULL with its reason, or FAILED.
        """
        ...

    def remove(self, keys: Sequence[Key], within_s: float) -> None:
        """Remove records; those that are not there are no error."""
        ...

    def touch(self, keys: Sequence[Key], within_s: float) -> None:
        """Make records recent, where the medium has such an order; else nothing."""
        ...

    def erase(self, root: Root) -> int:
        """Remove every record of a root; returns how many. May take as long as it takes."""
        ...

    def keys(self, root: Root) -> Iterator[Key] | None:
        """The keys of a root's records, in any order; None if it cannot list them.

        Listing may take as long as it takes, and raise TierError on the way.
        """
        ...

    def stats(self, within_s: float) -> Stats:
        """What the medium holds."""
        ...

    def close(self) -> None:
        """Give up connections and memory; nobody else is in a call."""
        ...
