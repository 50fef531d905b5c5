"""What is believed to be in a medium that others change as well, and what we are doing to it.

The life of a chunk, by what was heard of it last::

    nothing --look--> ASKED: whoever looked has the medium asked
    ASKED --answered, to this very question--> THERE or GONE
    ASKED --failed--> FAILED: the medium did not answer; a miss like GONE
    THERE --60 s--> nothing
    GONE, FAILED --half a second after somebody was told, or 30 s--> nothing
    any of these --found: a read or a write has just seen it--> THERE or GONE

and by what is under way, which comes first::

    nothing --begin_writes--> WRITING
    WRITING --end_writes--> nothing
    WRITING --doom: deleted meanwhile--> DOOMED
    DOOMED --end_writes--> TO_REMOVE
    nothing --doom: deleted, or wrong--> TO_REMOVE
    TO_REMOVE --take_removals--> REMOVING
    REMOVING --removed--> nothing, and GONE
    REMOVING --the removal failed--> TO_REMOVE, to be tried again

A chunk that is doomed, to be removed or being removed is a MISS, and is neither asked for, read nor
written.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from stepwell.core.keys import Key
from stepwell.core.types import Lookup, Reason

__all__ = ["Presence", "Question"]

_MAX_CHUNKS = 1 << 17
# What was there a while ago is probably still there; a read will tell.
_THERE_S = 60.0
# What was not there may have been written by another engine meanwhile.
_GONE_S = 0.5
# An answer that nobody has heard yet keeps for so long: an engine asks again at its next step.
_UNTOLD_S = 30.0
# Removals that fail are tried again; should there be more, the oldest are given up.
_MAX_REMOVALS = 1 << 14

Question = tuple[Key, int]
"""A chunk, and the number of the question whether it is there."""


class _Belief(Enum):
    ASKED = "asked"
    THERE = "there"
    GONE = "gone"
    FAILED = "failed"


class _Doing(Enum):
    WRITING = "writing"
    DOOMED = "doomed"
    TO_REMOVE = "to remove"
    REMOVING = "removing"


@dataclass(slots=True)
class _Entry:
    belief: _Belief
    since_s: float
    told: bool = False
    question: int = 0
    reason: Reason = Reason.ABSENT

    def holds(self, now_s: float) -> bool:
        """Whether it is still believed."""
        if self.belief is _Belief.ASKED:
            return True  # whoever asked will say how it ended
        if self.belief is _Belief.THERE:
            return now_s - self.since_s < _THERE_S
        return now_s - self.since_s < (_GONE_S if self.told else _UNTOLD_S)


class Presence:
    """Beliefs, the 131,072 latest, and what is under way, by key.

    Threading: any thread; only `begin_writes` waits. Cost: O(keys).

    Args:
        max_chunks: how many beliefs are kept.
    """

    def __init__(self, max_chunks: int = _MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._changed = threading.Condition()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._doing: dict[Key, _Doing] = {}
        self._num_questions = 0

    # Asking.

    def look(self, keys: Sequence[Key], now_s: float) -> tuple[list[Lookup], list[Question]]:
        """What is to be said of each key, and what the caller has to have the medium asked."""
        answers: list[Lookup] = []
        questions: list[Question] = []
        with self._changed:
            for key in keys:
                answer = self._answer(key, now_s)
                answers.append(answer)
                if answer is not Lookup.UNKNOWN:
                    continue
                entry = self._entries.get(key)
                if entry is None or entry.belief is not _Belief.ASKED:
                    self._num_questions += 1
                    asked = _Entry(_Belief.ASKED, now_s, question=self._num_questions)
                    self._put(key, asked)
                    questions.append((key, self._num_questions))
        return answers, questions

    def believes(self, keys: Sequence[Key], now_s: float) -> list[Lookup]:
        """The same without asking."""
        with self._changed:
            return [self._answer(key, now_s, tells=False) for key in keys]

    def known(self, keys: Sequence[Key], now_s: float) -> list[bool]:
        """Which of the chunks that are being written are believed to be there already."""
        with self._changed:
            found = []
            for key in keys:
                entry = self._entries.get(key)
                there = entry is not None and entry.belief is _Belief.THERE
                found.append(there and entry is not None and entry.holds(now_s))
            return found

    def why_missed(self, key: Key) -> Reason:
        """Why a key was said to be a MISS."""
        with self._changed:
            entry = self._entries.get(key)
            failed = entry is not None and entry.belief is _Belief.FAILED
            return entry.reason if entry is not None and failed else Reason.ABSENT

    def answered(self, questions: Sequence[Question], there: Sequence[bool], now_s: float) -> None:
        """What the medium said; what became known in another way meanwhile is newer."""
        if len(there) != len(questions):
            raise ValueError(f"not an answer each: questions={len(questions)} answers={len(there)}")
        with self._changed:
            for (key, number), here in zip(questions, there, strict=True):
                if self._is_open(key, number):
                    belief = _Belief.THERE if here else _Belief.GONE
                    self._put(key, _Entry(belief, now_s))

    def failed(self, questions: Sequence[Question], reason: Reason, now_s: float) -> None:
        """The medium did not say, or was not asked."""
        with self._changed:
            for key, number in questions:
                if self._is_open(key, number):
                    entry = _Entry(_Belief.FAILED, now_s, reason=reason)
                    self._put(key, entry)

    def found(self, keys: Sequence[Key], there: Sequence[bool], as_of_s: float) -> None:
        """What a read has seen that began at ``as_of_s``; what is known since then stays."""
        with self._changed:
            for key, here in zip(keys, there, strict=True):
                entry = self._entries.get(key)
                newer = entry is not None and entry.since_s > as_of_s
                asked = entry is not None and entry.belief is _Belief.ASKED
                if asked or not newer:
                    self._settle(key, here, as_of_s)

    # Writing and removing.

    def begin_writes(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """Begin to write chunks, once nothing is being removed of them; waits for that.

        Returns:
            For each whether it may be written; False if it is still being removed.
        """
        give_up_s = time.monotonic() + within_s
        with self._changed:
            while any(self._doing.get(key) is _Doing.REMOVING for key in keys):
                left_s = give_up_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
            free = [key not in self._doing for key in keys]
            for key, is_free in zip(keys, free, strict=True):
                if is_free:
                    self._doing[key] = _Doing.WRITING
            return free

    def end_writes(self, keys: Sequence[Key], there: Sequence[bool | None], now_s: float) -> None:
        """Writes have ended.

        Args:
            keys: that were free to be written.
            there: whether each is there now; None if nothing was heard of it.
            now_s: when the medium said so.
        """
        with self._changed:
            for key, here in zip(keys, there, strict=True):
                if self._doing.pop(key) is _Doing.DOOMED:
                    self._doing[key] = _Doing.TO_REMOVE
                elif here is not None:
                    self._settle(key, here, now_s)
            self._changed.notify_all()

    def doom(self, keys: Sequence[Key], now_s: float) -> int:
        """Chunks that are to be gone; returns how many of them were known to be there."""
        count = 0
        with self._changed:
            for key in keys:
                doing = self._doing.get(key)
                if doing is _Doing.WRITING:
                    count += 1
                    self._doing[key] = _Doing.DOOMED
                elif doing is None:
                    count += self._answer(key, now_s, tells=False) is Lookup.HIT
                    self._doing[key] = _Doing.TO_REMOVE
            self._bound_removals()
        return count

    def take_removals(self, among: Sequence[Key] | None = None, most: int = 1 << 30) -> list[Key]:
        """What is to be removed and nobody has begun to: of all, or among some keys.

        Args:
            among: these.
            most: so many at once.
        """
        with self._changed:
            wanted = list(self._doing) if among is None else among
            due = (key for key in wanted if self._doing.get(key) is _Doing.TO_REMOVE)
            keys = list(islice(dict.fromkeys(due), most))
            self._doing.update(dict.fromkeys(keys, _Doing.REMOVING))
            return keys

    def end_removals(self, keys: Sequence[Key], *, removed: bool, now_s: float) -> None:
        """What `take_removals` gave has been tried."""
        with self._changed:
            for key in keys:
                if removed:
                    del self._doing[key]
                    self._settle(key, False, now_s)
                else:
                    self._doing[key] = _Doing.TO_REMOVE
            self._bound_removals()
            self._changed.notify_all()

    @property
    def has_removals(self) -> bool:
        """Whether anything is to be removed that nobody has begun to."""
        with self._changed:
            return any(doing is _Doing.TO_REMOVE for doing in self._doing.values())

    def gone(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each is to be gone, although the medium may still have it."""
        with self._changed:
            return [self._doing.get(key, _Doing.WRITING) is not _Doing.WRITING for key in keys]

    def __len__(self) -> int:
        return len(self._entries)

    # Under the lock.

    def _answer(self, key: Key, now_s: float, *, tells: bool = True) -> Lookup:
        doing = self._doing.get(key)
        if doing is not None:
            return Lookup.PENDING if doing is _Doing.WRITING else Lookup.MISS
        entry = self._entries.get(key)
        if entry is None or entry.belief is _Belief.ASKED or not entry.holds(now_s):
            return Lookup.UNKNOWN
        if entry.belief is _Belief.THERE:
            return Lookup.HIT
        if tells and not entry.told:
            entry.told, entry.since_s = True, now_s
        return Lookup.MISS

    def _is_open(self, key: Key, number: int) -> bool:
        """Whether a question waits for its answer still; one that was forgotten does as well."""
        entry = self._entries.get(key)
        return key not in self._doing and (entry is None or entry.question == number)

    def _settle(self, key: Key, there: bool, as_of_s: float) -> None:
        # Who did something to it knows, so a miss is told already.
        belief = _Belief.THERE if there else _Belief.GONE
        self._put(key, _Entry(belief, as_of_s, told=True))

    def _bound_removals(self) -> None:
        while len(self._doing) > _MAX_REMOVALS:
            oldest = next((k for k, d in self._doing.items() if d is _Doing.TO_REMOVE), None)
            if oldest is None:
                return
            del self._doing[oldest]

    def _put(self, key: Key, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_chunks:
            self._entries.popitem(last=False)
