"""The store: several tiers, upper ones first, behind one facade."""

import errno
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, Root
from stepwell.core.leases import Lease
from stepwell.core.types import Chunk, JobResult, Lookup, Reason
from stepwell.errors import ClosedError, ConfigError, TierError
from stepwell.exporter import Exporter
from stepwell.manager import Manager, Promotion, WriteMode
from stepwell.pipeline import Pipeline
from stepwell.policy.admission import make_admission
from stepwell.policy.breaker import Breaker, State
from stepwell.policy.worth import Run, worth_chunks
from stepwell.settings import Settings, parse_target
from stepwell.tiers.base import Tier, TierContext, why_missed
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.guarded import GuardedTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.media.kinds import kind_of, open_medium
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.shared import SharedTier
from stepwell.tiers.striped import StripedTier, best_answers, best_tiers

__all__ = ["Prefix", "Store"]

logger = logging.getLogger(__name__)

# Of write-back: how long a store that is closed goes on copying down what has no copy yet.
_FLUSH_S = 10.0
_PRESSURE_EVERY_S = 0.1
# A drive that is broken, rather than a path that is wrong.
_BROKEN = frozenset(
    {errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT}
)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the store has of a prompt.

    Attributes:
        num_hits: leading chunks that some tier has.
        num_worth: leading chunks of those that are worth reading, the rest of them is computed
            sooner than it is read.
        unknown: whether a tier is still finding out about the chunk after them.
    """

    num_hits: int
    num_worth: int
    unknown: bool = False


class Store:
    """Tiers in order, the uppermost first.

    Threading: one thread calls; no method but `drain` and `close` waits.
    Ownership: as for a tier: a job's buffers belong to the store until `poll` reports it.
    Errors: outcomes are values; ClosedError after `close`.
    Cost: `lookup` one look-up per chunk and tier; `poll` O(ended jobs).

    Args:
        tiers: at least one, uppermost first.
        context: the one that the tiers were built with.
        manager: decides what goes where; by default everything everywhere.
        departed: where tiers note what they evicted, as (tier, fingerprint of the key).
        drives: the disk tiers among the tiers, or below them, for their numbers.
        missing: names of drives that are left out because they failed at the start.
        metrics_target: where to export counters, see `stepwell.exporter`; empty for nowhere.

    Raises:
        ConfigError: nothing can be exported there.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        context: TierContext,
        manager: Manager | None = None,
        *,
        departed: deque[tuple[int, int]] | None = None,
        drives: Sequence[DiskTier] = (),
        missing: Sequence[str] = (),
        metrics_target: str = "",
    ) -> None:
        if not tiers:
            raise ValueError("a store has at least one tier")
        self.tiers = tuple(tiers)
        self.context = context
        self.drives = tuple(drives)
        self._missing = tuple(missing)
        self._manager = manager or Manager([None] * len(tiers))
        self._pipeline = Pipeline(
            tiers, context, self._manager, deque() if departed is None else departed
        )
        self._closed = False
        self._exporter = None
        if metrics_target:
            target = parse_target(metrics_target)
            self._exporter = Exporter(target, context.metrics, self.gauges)

    @classmethod
    def open(cls, settings: Settings, context: TierContext | None = None) -> "Store":
        """A store as the settings say: host tier if it has a capacity, disk tier if there is a
        path, then what the url names.

        Raises:
            ConfigError: one of them cannot be used; nothing is left running.
        """
        return _Opening(settings, context or TierContext()).store()

    @property
    def unfinished(self) -> int:
        """Jobs that were begun and not yet reported by `poll`."""
        return self._pipeline.unfinished

    @property
    def degraded(self) -> bool:
        """Whether any drive is not asked at present because it failed or was slow."""
        closed = all(guard.breaker.state is State.CLOSED for guard in self.guards)
        return bool(self._missing) or not closed

    @property
    def guards(self) -> list[GuardedTier]:
        """The breakers' tiers, for their states."""
        found: list[GuardedTier] = []
        for tier in self.tiers:
            parts = tier.drives if isinstance(tier, StripedTier) else (tier,)
            found += [part for part in parts if isinstance(part, GuardedTier)]
        return found

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes that each tier takes, by name; those of a striped tier by drive."""
        used = {tier.name: tier.used_bytes for tier in self.tiers if isinstance(tier, HostTier)}
        return {**used, **{drive.name: drive.used_bytes for drive in self.drives}}

    def gauges(self) -> dict[tuple[str, str], float]:
        """Present values by (name, tier): see `stepwell.metrics.GAUGES`."""
        found: dict[tuple[str, str], float] = {
            ("used_bytes", name): float(used) for name, used in self.used_bytes.items()
        }
        for drive in self.drives:
            found["allocated_bytes", drive.name] = drive.allocated_bytes
            found["written_bytes", drive.name] = drive.wear.written_bytes
            found["write_pressure", drive.name] = drive.pressure
        for guard in self.guards:
            found["breaker_open", guard.name] = float(guard.breaker.state is not State.CLOSED)
        for name in self._missing:
            found["breaker_open", name] = 1.0
        return found

    @property
    def num_chunks(self) -> int:
        """Chunks on all drives."""
        return sum(len(drive) for drive in self.drives)

    def use_root(self, identity: Identity) -> Root:
        """Make an identity known, so that its description is stored beside its records."""
        return self.context.registry.add(identity)

    # Asking.

    def lookup(self, keys: Sequence[Key]) -> list[Lookup]:
        """The best answer of any tier for each key; asks and changes nothing."""
        return best_answers(self.tiers, keys)

    def why_missed(self, key: Key) -> Reason:
        """Why `lookup` just said MISS: BREAKER if a tier may have the chunk that is not asked,
        another reason if a shared tier could not say, else ABSENT."""
        return why_missed(self.tiers, key)

    def look_ahead(
        self,
        prefix: Sequence[Key],
        *,
        chunk_bytes: int,
        chunk_tokens: int,
        prefill_tokens_per_s: float | None,
        floor_tokens: int = 0,
        until_known: bool = False,
    ) -> Prefix:
        """How much of a prompt the store has, and how much of that is worth reading now.

        Args:
            prefix: the chunks that the engine does not have itself, in order.
            chunk_bytes, chunk_tokens: of each.
            prefill_tokens_per_s: how fast the engine computes; None if unknown, and then
                everything is worth reading.
            floor_tokens: less than this is not worth the trouble.
            until_known: decide nothing while a tier is still finding out; else what is not known
                by now counts as missing.
        """
        if chunk_bytes <= 0 or chunk_tokens <= 0:
            raise ValueError(
                f"a chunk has bytes and tokens: chunk_bytes={chunk_bytes} "
                f"chunk_tokens={chunk_tokens}"
            )
        runs: list[Run] = []
        num_hits = 0
        unknown = False
        for answer, tier_idx in best_tiers(self.tiers, prefix):
            if answer is not Lookup.HIT:
                unknown = answer is Lookup.UNKNOWN
                break
            if runs and runs[-1].tier_idx == tier_idx:
                last = runs.pop()
                runs.append(Run(tier_idx, last.num_chunks + 1, chunk_bytes, chunk_tokens))
            else:
                runs.append(Run(tier_idx, 1, chunk_bytes, chunk_tokens))
            num_hits += 1
        if not runs or (unknown and until_known):
            return Prefix(num_hits, 0, unknown)
        worth = worth_chunks(runs, self._pipeline.estimates(), prefill_tokens_per_s, floor_tokens)
        left = worth
        for run in runs:
            num_read = min(left, run.num_chunks)
            self._pipeline.promise(run.tier_idx, num_read * chunk_bytes)
            left -= num_read
        return Prefix(num_hits, worth, unknown)

    def acquire(self, keys: Iterable[Key], ttl_s: float) -> Lease:
        """Keep chunks from being evicted for ``ttl_s`` seconds, or until the lease is released.

        A long lease is a pin.
        """
        return self.context.leases.acquire(keys, ttl_s)

    # Doing.

    def read(self, chunks: Sequence[Chunk], deadline_s: float = 10.0) -> int:
        """Begin to fill the chunks' buffers; returns the id that `poll` will report."""
        self._check_open()
        return self._pipeline.read(chunks, deadline_s)

    def write(self, chunks: Sequence[Chunk], deadline_s: float = 30.0) -> int:
        """Begin to take chunks down; returns the id that `poll` will report."""
        self._check_open()
        return self._pipeline.write(chunks, deadline_s)

    def touch(self, prefix: Sequence[Key], deadline_s: float = 10.0) -> int:
        """Make chunks recent, the first of the prefix the most; returns an id for `poll`."""
        self._check_open()
        return self._pipeline.touch(prefix, deadline_s)

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call, each exactly once."""
        return self._pipeline.poll()

    def overdue(self) -> list[int]:
        """Jobs whose deadline has been over for a second and that still cannot be reported.

        A tier's system call does not return. Whoever waits may stop waiting, but must leave the
        job's buffers alone until `poll` reports it.
        """
        return self._pipeline.overdue()

    def delete(self, keys: Sequence[Key]) -> int:
        """Invalidate chunks in every tier; returns how many copies that were."""
        return self._pipeline.delete(keys)

    def drain(self, timeout_s: float) -> list[JobResult]:
        """Wait until every begun job has ended or the time is over; returns what `poll` would."""
        give_up_s = time.monotonic() + timeout_s
        ended = self.poll()
        while self.unfinished and time.monotonic() < give_up_s:
            time.sleep(0.001)
            ended += self.poll()
        return ended

    def close(self) -> None:
        """Stop every tier; may be called twice. `poll` still reports what was given up.

        Under write-back what has no copy below is copied down first, for ten seconds at most.
        """
        if self._closed:
            return
        self._closed = True
        self._flush()
        for tier in self.tiers:
            tier.close()
        if self._exporter is not None:
            self._exporter.close()

    def _flush(self) -> None:
        self._manager.plan_flush()
        give_up_s = time.monotonic() + _FLUSH_S
        while self._manager.has_dirty and time.monotonic() < give_up_s:
            self._pipeline.work()
            time.sleep(0.001)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")


class _Opening:
    """Builds the tiers of a store, and takes them down again if one cannot be built."""

    def __init__(self, settings: Settings, context: TierContext) -> None:
        self._settings = settings
        self._context = context
        self._drives: list[DiskTier] = []
        self._missing: list[str] = []
        self._departed: deque[tuple[int, int]] = deque(maxlen=1 << 16)
        self._ask_again_s = 0.0
        self._known_pressure = 0.0

    def store(self) -> Store:
        """The store.

        Raises:
            ConfigError: a path or the url cannot be used.
        """
        settings = self._settings
        with_host = bool(settings.host_capacity_bytes)
        disk_idx = int(with_host)
        with_disk, with_shared = bool(settings.paths), bool(settings.url)
        # As many offers are remembered as chunks of 1 MiB would fit, within reason.
        num_tags = max(1 << 12, min(settings.capacity_bytes >> 20, 1 << 20))
        admission = make_admission(settings.admission, num_tags)
        manager = Manager(
            [None] * with_host + [admission] * with_disk + [None] * with_shared,
            write_mode=WriteMode(settings.write_mode),
            promotion=Promotion(settings.promotion),
            top_capacity_bytes=settings.host_capacity_bytes,
            pressure=self._pressure,
        )
        tiers: list[Tier] = []
        try:
            if with_shared:  # first, since it is the one that may be misspelt
                tiers = [self._shared()]
            if with_disk:
                tiers = [self._disk(disk_idx), *tiers]
            if with_host:
                tiers = [self._host(manager), *tiers]
            store = Store(
                tiers,
                self._context,
                manager,
                departed=self._departed,
                drives=self._drives,
                missing=self._missing,
                metrics_target=settings.metrics,
            )
            for drive in self._drives:
                drive.note_metrics(settings.metrics)
        except BaseException:  # counted: it is raised on
            for tier in (*tiers, *self._drives):
                tier.close()
            raise
        return store

    def _host(self, manager: Manager) -> HostTier:
        settings = self._settings
        return HostTier(
            settings.host_capacity_bytes,
            self._context,
            inflight_writes_bytes=settings.inflight_writes_bytes,
            policy=settings.eviction,
            ttl_s=settings.ttl_s,
            keeps=manager.keeps,
            on_evicted=lambda tag: self._departed.append((0, tag)),
        )

    def _shared(self) -> Tier:
        settings = self._settings
        url = MediumUrl.parse(settings.url)
        kind = kind_of(url)
        patience_s = min(settings.slow_after_s, settings.read_deadline_s)
        medium = open_medium(url, patience_s)
        try:
            medium.check()
        except TierError as error:
            # It may be there later, and an engine must not wait for it.
            logger.error("starting without an answer: url=%s error=%s", url.shown, error)
        except BaseException:  # counted: it is raised on
            medium.close()
            raise
        tier = SharedTier(
            medium,
            self._context,
            name=kind.name,
            num_threads=settings.io_threads,
            inflight_writes_bytes=settings.inflight_writes_bytes,
            ttl_s=settings.ttl_s,
            answer_within_s=patience_s,
        )
        return GuardedTier(tier, Breaker(latency_limit_s=settings.slow_after_s), self._context)

    def _disk(self, tier_idx: int) -> Tier:
        guarded: list[Tier] = []
        paths = self._settings.paths
        for idx, path in enumerate(paths):
            name = f"disk{idx}" if len(paths) > 1 else "disk"
            try:
                drive = self._drive(path, name, tier_idx)
            except ConfigError as error:
                if not _is_broken_drive(error) or len(paths) == 1:
                    raise
                logger.error("starting without a drive that fails: %s", error)
                self._missing.append(name)
                continue
            self._drives.append(drive)
            breaker = Breaker(latency_limit_s=self._settings.slow_after_s)
            guarded.append(GuardedTier(drive, breaker, self._context))
        if not guarded:
            raise ConfigError(f"no drive can be used: paths={','.join(map(str, paths))}")
        # The same names whether or not a drive is missing.
        return guarded[0] if len(paths) == 1 else StripedTier(guarded, self._context)

    def _drive(self, path: Path, name: str, tier_idx: int) -> DiskTier:
        settings = self._settings
        num_drives = len(settings.paths)
        return DiskTier(
            path,
            settings.capacity_bytes // num_drives,
            self._context,
            min_free_bytes=settings.min_free_bytes,
            num_threads=settings.io_threads,
            inflight_writes_bytes=settings.inflight_writes_bytes // num_drives,
            policy=settings.eviction,
            ttl_s=settings.ttl_s,
            drive_writes_per_day=settings.drive_writes_per_day,
            name=name,
            on_evicted=lambda tag: self._departed.append((tier_idx, tag)),
        )

    def _pressure(self, tier_idx: int) -> float:
        # Asked for every chunk of a write, and it changes slowly.
        now_s = self._context.clock.monotonic()
        if self._settings.drive_writes_per_day and now_s >= self._ask_again_s:
            self._ask_again_s = now_s + _PRESSURE_EVERY_S
            self._known_pressure = max((drive.pressure for drive in self._drives), default=0.0)
        return self._known_pressure


def _is_broken_drive(error: ConfigError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _BROKEN
