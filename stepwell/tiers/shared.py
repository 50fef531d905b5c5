"""A tier on a medium that other engines use too: what is there is found out, not remembered."""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, Root, fingerprint, root_of
from stepwell.core.record import Header, payload_checksum
from stepwell.core.types import Chunk, ChunkResult, Direction, Lookup, Outcome, Reason
from stepwell.errors import TierError
from stepwell.tiers.base import TierContext
from stepwell.tiers.jobs import JobRunner
from stepwell.tiers.media.base import Medium, Record, Stats, Wanted
from stepwell.tiers.media.records import ABSENT
from stepwell.tiers.media.roots import describe, description_key, erase_root
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, FAILED, verdict
from stepwell.tiers.presence import Presence, Question
from stepwell.tiers.threaded import ThreadedTier

__all__ = ["SharedTier"]

logger = logging.getLogger(__name__)

_BEING_REMOVED = ChunkResult(Outcome.FULL, Reason.DEADLINE)

# Questions that wait for a thread; beyond it the answer is MISS.
_MAX_ASKED = 1 << 16
# Of one call, which has to be over in time as a whole: an object store is asked for each by itself.
_ASK_AT_ONCE = 512
_REMOVE_AT_ONCE = 256
_TOUCH_AT_ONCE = 256
_REMOVE_AGAIN_S = 1.0
# A chunk that is used all the time is made recent in the medium once in a while.
_TOUCH_EVERY_S = 600.0
_MAX_TOUCHED = 1 << 16
# A description may be evicted as any other record.
_DESCRIBE_EVERY_S = 3600.0
_UPKEEP_WITHIN_S = 10.0
_MAX_TROUBLES = 64
_MAX_EXPIRED = 1 << 14
_LEAST_S = 0.25  # what has begun in time is given so long

# Misses for which the record was read and is not what it should be.
_WRONG = frozenset(
    {
        Reason.CHECKSUM,
        Reason.HEADER,
        Reason.IDENTITY,
        Reason.TRUNCATED,
        Reason.LAYOUT,
        Reason.NOT_A_FILE,
    }
)


class SharedTier(ThreadedTier):
    """Records in a `stepwell.tiers.media.base.Medium`.

    Whether a chunk is there is asked for once and believed for a while (`Presence`); until the
    medium has answered, `contains` says UNKNOWN. A record that turns out to be wrong is read once
    more, since it may have been the way here; if it is wrong again it is removed, for everybody.

    Threading, Ownership, Errors: as `stepwell.tiers.base.Tier` states. Cost: `contains` and
    `submit` O(chunks).

    Args:
        medium: owned by this tier from now on.
        context: shared by the store's tiers.
        name: for metrics and reports.
        num_threads: that read and write.
        inflight_writes_bytes: writes beyond this are refused.
        ttl_s: how long a chunk stays valid after it was written; 0 for ever.
        answer_within_s: how long the medium may take to say what is there.
    """

    finds_out = True
    """What it says of a chunk it was told by the medium, a miss as well."""

    def __init__(
        self,
        medium: Medium,
        context: TierContext,
        *,
        name: str,
        num_threads: int = 8,
        inflight_writes_bytes: int = 4 << 30,
        ttl_s: float = 0.0,
        answer_within_s: float = 2.0,
    ) -> None:
        self.name = name
        self.medium = medium
        self.troubles: deque[float] = deque(maxlen=_MAX_TROUBLES)
        """When operations began that failed and belong to no job, monotonic seconds; whoever
        minds the tier takes them out."""
        self._context = context
        self._ttl_s = ttl_s
        self._answer_within_s = answer_within_s
        self._presence = Presence()
        self._lock = threading.Lock()
        self._asked: deque[Question] = deque()
        self._ask_is_due = False
        self._removal_is_due = False
        self._remove_again_s = 0.0
        self._touched: OrderedDict[int, float] = OrderedDict()  # fingerprint -> when
        self._to_touch: dict[Key, None] = {}
        self._expired: OrderedDict[Key, None] = OrderedDict()
        self._described: dict[Root, float] = {}  # -> when
        self._to_describe: set[Root] = set()
        self._closed = False
        self._runner = JobRunner(self, num_threads, context, inflight_writes_bytes)

    # The tier.

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.Tier.contains`."""
        if self._closed:
            return [Lookup.MISS] * len(keys)
        answers, questions = self._presence.look(keys, self._now_s())
        if questions:
            self._ask_soon(questions)
        return answers

    def believes(self, keys: Sequence[Key]) -> list[Lookup]:
        """See `stepwell.tiers.base.believed`."""
        return self._presence.believes(keys, self._now_s())

    def why_missed(self, key: Key) -> Reason:
        """Why `contains` said MISS."""
        return self._presence.why_missed(key)

    def delete(self, keys: Sequence[Key]) -> int:
        """See `stepwell.tiers.base.Tier.delete`. Counts the chunks that it knew to be there."""
        if self._closed:
            return 0
        count = self._presence.doom(keys, self._now_s())
        self._remove_soon()
        return count

    def close(self) -> None:
        """See `stepwell.tiers.base.Tier.close`."""
        if self._closed:
            return
        self._closed = True
        if self._runner.close():
            self.medium.close()
        else:
            logger.warning("a medium does not answer and is left: tier=%s", self.name)

    # For tools; these block.

    def erase(self, root: Root) -> int:
        """Remove all chunks of a root, and its description; returns how many chunks."""
        count = erase_root(self.medium, root)
        with self._lock:
            self._described.pop(root, None)
        return count

    def stats(self) -> Stats:
        """What the medium says of itself."""
        return self.medium.stats(self._answer_within_s)

    # Jobs; on the runner's threads.

    def run_batch(
        self, direction: Direction, chunks: Sequence[Chunk], within_s: float
    ) -> Sequence[ChunkResult]:
        """See `stepwell.tiers.jobs.Work.run_batch`."""
        run = self._read if direction is Direction.READ else self._write
        return run(chunks, self._now_s() + within_s)

    def use(self, prefix: Sequence[Key]) -> Sequence[bool]:
        """See `stepwell.tiers.jobs.Work.use`."""
        now_s = self._now_s()
        there = [answer is Lookup.HIT for answer in self._presence.believes(prefix, now_s)]
        with self._lock:
            roots: set[Root] = set()
            # The first of the prefix last, so that it is the most recent.
            for key, here in reversed(list(zip(prefix, there, strict=True))):
                tag = fingerprint(key)
                if here and now_s - self._touched.get(tag, -_TOUCH_EVERY_S) >= _TOUCH_EVERY_S:
                    self._note_touched(tag, now_s)
                    self._to_touch[key] = None
                    roots.add(root_of(key))
            self._to_touch.update(dict.fromkeys(map(description_key, roots)))
        return there

    def settle(self) -> None:
        """See `stepwell.tiers.jobs.Work.settle`."""
        self._touch()
        self._describe()
        if self._presence.has_removals and self._now_s() >= self._remove_again_s:
            self._remove(None)  # what was deleted while it was written, or could not be before

    def _read(self, chunks: Sequence[Chunk], give_up_s: float) -> Sequence[ChunkResult]:
        began_s = self._now_s()
        gone = self._presence.gone([chunk.key for chunk in chunks])
        results = [ABSENT] * len(chunks)
        left = [idx for idx in range(len(chunks)) if not gone[idx]]
        self._read_some(chunks, left, results, give_up_s)
        wrong = [idx for idx in left if results[idx].reason in _WRONG]
        if wrong:
            # What was damaged on its way, or in this machine's memory, is nobody's to remove.
            self._read_some(chunks, wrong, results, give_up_s)
            wrong = [idx for idx in wrong if results[idx].reason in _WRONG]
            self._set_aside(chunks, wrong, results)
        self._note_expired(chunks, results)
        known = [idx for idx in left if results[idx].outcome is not Outcome.FAILED]
        self._presence.found(
            [chunks[idx].key for idx in known],
            [results[idx].outcome is Outcome.DONE for idx in known],
            began_s,
        )
        return results

    def _read_some(
        self,
        chunks: Sequence[Chunk],
        idxs: Sequence[int],
        results: list[ChunkResult],
        give_up_s: float,
    ) -> None:
        """Read some of the chunks, and put what became of each in its place."""
        if not idxs:
            return
        wanted = [Wanted(chunks[idx].key, chunks[idx].buffer) for idx in idxs]
        try:
            found = self.medium.read(wanted, self._left_s(give_up_s))
        except TierError as error:
            self._log_failure("read", error)
            for idx in idxs:
                results[idx] = FAILED
            return
        now_us = int(self._context.wall_s() * 1e6)
        for idx, each in zip(idxs, found, strict=True):
            results[idx] = (
                each if isinstance(each, ChunkResult) else verdict(each, chunks[idx], now_us)
            )

    def _set_aside(
        self, chunks: Sequence[Chunk], wrong: Sequence[int], results: Sequence[ChunkResult]
    ) -> None:
        for idx in wrong:
            reason = results[idx].reason
            self._context.metrics.add("quarantined_chunks", (self.name, reason))
            logger.warning(
                "a record is wrong and is removed: reason=%s tier=%s key=%s",
                reason, self.name, chunks[idx].key.hex(),
            )  # fmt: skip
        keys = [chunks[idx].key for idx in wrong]
        if keys:  # it is gone from now on; nobody has to wait until the medium knows
            self._presence.doom(keys, self._now_s())
            self._remove_soon()

    def _note_expired(self, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        with self._lock:
            for chunk, result in zip(chunks, results, strict=True):
                if result.reason is Reason.EXPIRED:
                    self._expired[chunk.key] = None
            while len(self._expired) > _MAX_EXPIRED:
                self._expired.popitem(last=False)

    def _write(self, chunks: Sequence[Chunk], give_up_s: float) -> Sequence[ChunkResult]:
        keys = [chunk.key for chunk in chunks]
        self._make_way(keys, self._left_s(give_up_s))
        free = self._presence.begin_writes(keys, self._left_s(give_up_s))
        idxs = [idx for idx in range(len(chunks)) if free[idx]]
        results = [_BEING_REMOVED] * len(chunks)
        there: dict[int, bool | None] = dict.fromkeys(idxs)
        try:
            self._write_some(chunks, idxs, results, there, give_up_s)
        finally:
            written = [keys[idx] for idx in idxs]
            self._presence.end_writes(written, [there[idx] for idx in idxs], self._now_s())
        now_s = self._now_s()
        with self._lock:
            for idx in idxs:
                if results[idx] == DONE:  # what is new is recent
                    self._note_touched(fingerprint(keys[idx]), now_s)
                    self._to_describe.add(root_of(keys[idx]))
        return results

    def _write_some(
        self,
        chunks: Sequence[Chunk],
        idxs: Sequence[int],
        results: list[ChunkResult],
        there: dict[int, bool | None],
        give_up_s: float,
    ) -> None:
        """Write what is not there; puts results, and what the medium said, in their places."""
        known = self._presence.known([chunks[idx].key for idx in idxs], self._now_s())
        for idx in idxs:
            results[idx] = ALREADY_THERE
        doubtful = [idx for idx, here in zip(idxs, known, strict=True) if not here]
        try:
            if doubtful:
                asked = [chunks[idx].key for idx in doubtful]
                found = self.medium.exist(asked, self._left_s(give_up_s))
                there.update(zip(doubtful, found, strict=True))
                doubtful = [idx for idx in doubtful if not there[idx]]
            if doubtful:
                records = [self._record(chunks[idx]) for idx in doubtful]
                written = self.medium.write(records, self._left_s(give_up_s))
                for idx, result in zip(doubtful, written, strict=True):
                    results[idx] = result
                    failed = result.outcome is Outcome.FAILED
                    there[idx] = None if failed else result.outcome is Outcome.DONE
        except TierError as error:
            self._log_failure("write", error)
            for idx in doubtful:
                results[idx], there[idx] = FAILED, None

    def _make_way(self, keys: Sequence[Key], within_s: float) -> None:
        """What is to be removed is, before it is written anew; so is what has expired.

        And that not when it is met: by this machine's clock it has, which may be wrong.
        """
        with self._lock:
            expired = [key for key in keys if key in self._expired]
            for key in expired:
                del self._expired[key]
        if expired:
            self._presence.doom(expired, self._now_s())
        self._remove(keys, min(within_s, _UPKEEP_WITHIN_S))

    def _record(self, chunk: Chunk) -> Record:
        now_s = self._context.wall_s()
        # A copy lives as long as what it was copied from.
        expires_at_s = chunk.expires_at_s or (now_s + self._ttl_s if self._ttl_s else 0.0)
        header = Header(
            chunk.key,
            len(chunk.buffer),
            payload_checksum(chunk.buffer),
            int(now_s * 1e6),
            int(expires_at_s * 1e6),
            chunk.end_token,
        )
        return Record(chunk.key, header.pack(), chunk.buffer, expires_at_s)

    # Beside the jobs.

    def _ask_soon(self, questions: Sequence[Question]) -> None:
        with self._lock:
            room = _MAX_ASKED - len(self._asked)
            self._asked.extend(questions[:room])
            due, self._ask_is_due = not self._ask_is_due, True
        if questions[room:]:
            self._presence.failed(questions[room:], Reason.QUEUE_FULL, self._now_s())
        if due:  # an engine asks for one chunk after the other; they go together
            self._runner.run_soon(self._ask)

    def _ask(self) -> None:
        with self._lock:
            count = min(len(self._asked), _ASK_AT_ONCE)
            questions = [self._asked.popleft() for _ in range(count)]
            more = self._ask_is_due = bool(self._asked)
        if more:
            self._runner.run_soon(self._ask)
        if not questions:
            return
        began_s = self._now_s()
        reason = Reason.INTERNAL
        try:
            if self._closed:
                return
            there = self.medium.exist([key for key, _ in questions], self._answer_within_s)
            self._presence.answered(questions, there, self._now_s())
        except TierError as error:
            self._log_failure("lookup", error)
            self.troubles.append(began_s)
            reason = Reason.IO_ERROR
            if self._now_s() - began_s >= self._answer_within_s / 2:
                questions += self._asked_besides()  # they would wait as long
        finally:  # what has no answer by now will have none, and somebody waits for it
            self._presence.failed(questions, reason, self._now_s())

    def _asked_besides(self) -> list[Question]:
        """What waits to be asked, and is asked no more."""
        with self._lock:
            questions = list(self._asked)
            self._asked.clear()
        return questions

    def _remove_soon(self) -> None:
        with self._lock:
            due, self._removal_is_due = not self._removal_is_due, True
        if due:
            self._runner.run_soon(self._remove_waiting)

    def _remove_waiting(self) -> None:
        with self._lock:
            self._removal_is_due = False
        self._remove(None)

    def _remove(self, among: Sequence[Key] | None, within_s: float = _UPKEEP_WITHIN_S) -> None:
        """Remove what is to be removed, of all or among some keys, until something fails."""
        give_up_s = self._now_s() + within_s
        removed = True
        while removed and (keys := self._presence.take_removals(among, _REMOVE_AT_ONCE)):
            removed = False
            left_s = self._left_s(give_up_s)
            try:
                removed = self._keep_up(partial(self.medium.remove, keys, left_s))
            finally:
                now_s = self._now_s()
                self._presence.end_removals(keys, removed=removed, now_s=now_s)
                if not removed:
                    self._remove_again_s = now_s + _REMOVE_AGAIN_S

    def _touch(self) -> None:
        """Make recent in the medium what was used; what fails is tried at its next use."""
        with self._lock:
            keys, self._to_touch = list(self._to_touch), {}
        for begin in range(0, len(keys), _TOUCH_AT_ONCE):
            some = keys[begin : begin + _TOUCH_AT_ONCE]
            if not self._keep_up(partial(self.medium.touch, some, self._answer_within_s)):
                with self._lock:
                    for key in keys[begin:]:
                        self._touched.pop(fingerprint(key), None)
                return

    def _keep_up(self, run: Callable[[], object]) -> bool:
        """Something for the medium's sake; returns whether it was done."""
        began_s = self._now_s()
        try:
            run()
        except TierError as error:
            self._log_failure("upkeep", error)
            self.troubles.append(began_s)
            return False
        return True

    def _describe(self) -> None:
        """Write the descriptions of roots that have new chunks, each once in a while; they are
        for people.
        """
        now_s = self._now_s()
        with self._lock:
            roots = [
                root
                for root in self._to_describe
                if now_s - self._described.get(root, -_DESCRIBE_EVERY_S) >= _DESCRIBE_EVERY_S
            ]
            self._to_describe.clear()
            self._described.update(dict.fromkeys(roots, now_s))
        for root in roots:
            identity = self._context.registry.get(root)
            if identity is not None and not self._keep_up(partial(self._describe_one, identity)):
                with self._lock:
                    self._described.pop(root, None)

    def _describe_one(self, identity: Identity) -> None:
        if not describe(self.medium, identity, self._context.wall_s(), self._answer_within_s):
            with self._lock:
                self._described.pop(identity.root, None)

    def _note_touched(self, tag: int, now_s: float) -> None:
        self._touched[tag] = now_s
        self._touched.move_to_end(tag)
        while len(self._touched) > _MAX_TOUCHED:
            self._touched.popitem(last=False)

    def _log_failure(self, what: str, error: TierError) -> None:
        logger.warning("a %s failed: tier=%s error=%s", what, self.name, error)

    def _left_s(self, give_up_s: float) -> float:
        return max(give_up_s - self._now_s(), _LEAST_S)

    def _now_s(self) -> float:
        return self._context.clock.monotonic()
