"""What is believed of a medium that others change as well, and what is being done to it."""

import threading
import time

import pytest

from stepwell.core.types import Lookup, Reason
from stepwell.testing import key_of
from stepwell.tiers import presence as presence_module
from stepwell.tiers.presence import Presence

A, B, C = (key_of(name) for name in "abc")
HIT, MISS, PENDING, UNKNOWN = Lookup.HIT, Lookup.MISS, Lookup.PENDING, Lookup.UNKNOWN


def asked(presence: Presence, *keys: object, now_s: float = 0.0) -> list[object]:
    """The keys that somebody has to ask for."""
    return [key for key, _ in presence.look(keys, now_s)[1]]  # type: ignore[arg-type]


def said(presence: Presence, *keys: object, now_s: float = 0.0) -> list[Lookup]:
    return presence.look(keys, now_s)[0]  # type: ignore[arg-type]


# Asking.


def test_a_question_is_asked_once() -> None:
    presence = Presence()
    answers, questions = presence.look([A, B], 0.0)
    assert answers == [UNKNOWN] * 2
    assert [key for key, _ in questions] == [A, B]
    assert asked(presence, A, B, C, now_s=100.0) == [C]
    presence.answered(questions, [True, False], 100.0)
    assert said(presence, A, B, C, now_s=100.0) == [HIT, MISS, UNKNOWN]


def test_a_hit_is_believed_for_a_minute() -> None:
    presence = Presence()
    presence.found([A], [True], 0.0)
    assert said(presence, A, now_s=59.9) == [HIT]
    assert asked(presence, A, now_s=60.0) == [A]


def test_a_miss_waits_to_be_told_and_is_then_soon_forgotten() -> None:
    """Half a second from then on, not from the answer: others wait for the same chunk."""
    presence = Presence()
    presence.answered(presence.look([A, B], 0.0)[1], [False, False], 0.0)
    assert said(presence, A, now_s=29.0) == [MISS]
    assert said(presence, A, now_s=29.4) == [MISS]
    assert asked(presence, A, now_s=29.5) == [A]
    assert asked(presence, B, now_s=30.0) == [B]


def test_what_we_did_ourselves_is_told_already() -> None:
    presence = Presence()
    presence.found([A], [False], 0.0)
    assert said(presence, A, now_s=0.4) == [MISS]
    assert asked(presence, A, now_s=0.5) == [A]


def test_what_became_known_meanwhile_is_newer_than_an_answer() -> None:
    presence = Presence()
    questions = presence.look([A, B], 0.0)[1]
    presence.found([A], [True], 1.0)
    presence.answered(questions, [False, False], 2.0)
    assert said(presence, A, B, now_s=2.0) == [HIT, MISS]


def test_a_late_answer_is_not_taken_for_a_later_question() -> None:
    presence = Presence()
    late = presence.look([A], 0.0)[1]
    presence.found([A], [False], 1.0)
    again = presence.look([A], 2.0)[1]
    presence.answered(late, [True], 2.0)
    presence.failed(late, Reason.IO_ERROR, 2.0)
    assert said(presence, A, now_s=2.0) == [UNKNOWN]
    presence.answered(again, [False], 2.0)
    assert said(presence, A, now_s=2.0) == [MISS]


def test_a_read_that_began_before_what_is_known_tells_nothing() -> None:
    presence = Presence()
    presence.found([A], [False], 5.0)
    presence.found([A], [True], 4.0)
    assert said(presence, A, now_s=5.0) == [MISS]
    presence.found([A], [True], 6.0)
    assert said(presence, A, now_s=6.0) == [HIT]


def test_a_question_without_an_answer_is_a_miss_with_its_reason() -> None:
    presence = Presence()
    questions = presence.look([A, B], 0.0)[1]
    presence.found([B], [True], 0.0)
    presence.failed(questions, Reason.IO_ERROR, 1.0)
    assert said(presence, A, B, now_s=1.0) == [MISS, HIT]
    assert presence.why_missed(A) is Reason.IO_ERROR
    assert presence.why_missed(B) is presence.why_missed(C) is Reason.ABSENT
    assert asked(presence, A, now_s=1.5) == [A]
    assert presence.why_missed(A) is Reason.ABSENT


def test_believing_asks_nothing_and_tells_nothing() -> None:
    presence = Presence()
    assert presence.believes([A], 0.0) == [UNKNOWN]
    questions = presence.look([A, B], 0.0)[1]
    presence.answered(questions, [True, False], 0.0)
    assert presence.believes([A, B], 20.0) == [HIT, MISS]
    assert presence.believes([B], 29.0) == [MISS], "it has not been told yet"
    assert presence.known([A, B], 59.0) == [True, False]
    assert presence.known([A], 60.0) == [False]


def test_it_is_bounded() -> None:
    """The oldest belief leaves; an answer to a question that has left is taken all the same."""
    presence = Presence(max_chunks=2)
    questions = presence.look([A, B, C], 0.0)[1]
    assert len(presence) == 2
    presence.answered(questions[:1], [True], 0.0)
    assert len(presence) == 2
    assert presence.believes([A, B, C], 0.0) == [HIT, UNKNOWN, UNKNOWN]


# Writing and removing.


def test_a_write() -> None:
    presence = Presence()
    assert presence.begin_writes([A, B, C], 0.0) == [True] * 3
    assert said(presence, A, B, C) == [PENDING] * 3
    presence.end_writes([A, B, C], [True, False, None], 0.0)
    assert said(presence, A, B, C) == [HIT, MISS, UNKNOWN]


def test_a_chunk_that_is_deleted_while_it_is_written() -> None:
    presence = Presence()
    presence.begin_writes([A], 0.0)
    assert presence.doom([A], 0.0) == 1
    assert presence.doom([A], 0.0) == 0
    assert said(presence, A) == [MISS]
    assert presence.gone([A, B]) == [True, False]
    assert presence.take_removals() == []
    presence.end_writes([A], [True], 0.0)
    assert said(presence, A) == [MISS]
    assert presence.take_removals() == [A]
    presence.end_removals([A], removed=True, now_s=0.0)
    assert said(presence, A) == [MISS]
    assert not presence.has_removals


def test_what_is_to_be_gone_is_a_miss_until_it_is() -> None:
    """However long it takes, whatever a read or an answer says meanwhile."""
    presence = Presence()
    questions = presence.look([A], 0.0)[1]
    presence.found([B], [True], 0.0)
    assert presence.doom([A, B, C], 1.0) == 1
    assert presence.take_removals([B, C]) == [B, C]
    presence.answered(questions, [True], 50.0)
    presence.found([A, B, C], [True] * 3, 50.0)
    assert presence.look([A, B, C], 100.0) == ([MISS] * 3, [])
    assert presence.begin_writes([A], 0.0) == [False]
    presence.end_removals([B], removed=True, now_s=100.0)
    presence.end_removals([C], removed=False, now_s=100.0)
    assert presence.look([A, B, C], 100.4) == ([MISS] * 3, [])
    assert asked(presence, B, now_s=100.5) == [B], "gone, as far as we know"
    assert presence.has_removals
    assert presence.take_removals() == [A, C]
    presence.end_removals([A, C], removed=True, now_s=101.0)
    assert presence.begin_writes([A, B, C], 0.0) == [True] * 3


def test_a_write_waits_until_the_chunk_is_removed() -> None:
    presence = Presence()
    presence.doom([A], 0.0)
    presence.take_removals()
    began_s = time.monotonic()
    assert presence.begin_writes([A, B], 0.05) == [False, True]
    assert time.monotonic() - began_s >= 0.05
    timer = threading.Timer(
        0.05, lambda: presence.end_removals([A], removed=True, now_s=0.0)
    )  # fmt: skip
    timer.start()
    assert presence.begin_writes([A], 20.0) == [True]
    timer.join()


def test_removals_that_fail_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "_MAX_REMOVALS", 3)
    presence = Presence()
    keys = [key_of(idx) for idx in range(5)]
    presence.doom(keys[:3], 0.0)
    taken = presence.take_removals(keys[:1])
    presence.doom(keys[3:], 0.0)
    presence.end_removals(taken, removed=False, now_s=0.0)
    assert len(presence.take_removals()) == 3
