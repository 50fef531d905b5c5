"""The journal: what was noted is what is replayed, whatever happened to the file's end."""

import errno
import hashlib
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.core.keys import Root
from stepwell.policy.endurance import EnduranceState
from stepwell.tiers import journal as journals
from stepwell.tiers.frames import (
    ENTRY,
    Image,
    JournalError,
    Kind,
    encode,
    encode_aside,
    encode_free,
    encode_root,
    encode_rows,
    encode_touch,
    encode_wear,
    replay,
)
from stepwell.tiers.journal import Journal

HEAD = struct.pack("<8sHHI", b"SWJOURNL", 1, 0, 0)
HEAD = HEAD[:12] + struct.pack("<I", zlib.crc32(HEAD))

Row = tuple[int, int, int, int, int]  # tag, place, root, used at, expires at


def root_of(number: int) -> Root:
    return Root(hashlib.sha256(bytes([number % 256])).digest())


def wear_of(number: int) -> EnduranceState:
    return EnduranceState(number, number // 2, 7 - number, number // 3)


def entries(rows: Sequence[Row]) -> Any:
    made = np.zeros(len(rows), ENTRY)
    for idx, (tag, place, root, used_at_s, expires_at_s) in enumerate(rows):
        made[idx] = (tag, place, root, 0, used_at_s, expires_at_s, 0)
    return made


@dataclass(frozen=True)
class Frame:
    """One frame as a value."""

    kind: Kind
    rows: tuple[Row, ...] = ()
    places: tuple[int, ...] = ()
    number: int = 0

    def encoded(self) -> bytes:
        if self.kind is Kind.ROOT:
            return encode_root(self.number, root_of(self.number))
        if self.kind is Kind.FREE:
            return encode_free(self.places)
        if self.kind is Kind.TOUCH:
            return encode_touch(self.places, self.number)
        if self.kind is Kind.ASIDE:
            return encode_aside(self.places[0], self.number)
        if self.kind is Kind.WEAR:
            return encode_wear(wear_of(self.number))
        return encode_rows(self.kind, entries(self.rows))


@dataclass
class Slow:
    """What frames say, one entry after the other: slow, and plainly right."""

    rows: dict[int, list[int]] = field(default_factory=dict)  # by place, the first leaves first
    roots: dict[int, Root] = field(default_factory=dict)
    aside: dict[int, int] = field(default_factory=dict)
    wear: EnduranceState | None = None

    def see(self, frame: Frame) -> None:
        if frame.kind is Kind.ROOT:
            self.roots[frame.number] = root_of(frame.number)
        elif frame.kind is Kind.WEAR:
            self.wear = wear_of(frame.number)
        elif frame.kind in (Kind.SNAPSHOT, Kind.PUT):
            for row in frame.rows if frame.kind is Kind.SNAPSHOT else frame.rows[::-1]:
                self.rows.pop(row[1], None)
                self.rows[row[1]] = list(row)
                self.aside.pop(row[1], None)
        elif frame.kind is Kind.TOUCH:
            for place in frame.places[::-1]:
                if place in self.rows:
                    row = self.rows.pop(place)
                    row[3] = frame.number
                    self.rows[place] = row
        else:
            for place in frame.places:
                self.rows.pop(place, None)
                self.aside.pop(place, None)
                if frame.kind is Kind.ASIDE:
                    self.aside[place] = frame.number


def said(frames: Sequence[Frame]) -> tuple[Any, ...]:
    """What a replay must find."""
    slow = Slow()
    for frame in frames:
        slow.see(frame)
    rows = [tuple(row) for row in slow.rows.values()]
    return rows, slow.roots, slow.aside, slow.wear


def found(image: Image) -> tuple[Any, ...]:
    names = ["tag", "place", "root", "used_at_s", "expires_at_s"]
    rows = [tuple(int(row[name]) for name in names) for row in image.rows]
    return rows, image.roots, image.aside, image.wear


def bytes_of(frames: Sequence[Frame]) -> bytes:
    return HEAD + b"".join(frame.encoded() for frame in frames)


some_places = st.integers(0, 9).map(lambda idx: idx // 5 << 32 | idx % 5)
some_rows = st.tuples(
    st.integers(0, (1 << 60) - 1),
    some_places,
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFFFFFFFF),
)
row_lists = st.lists(some_rows, max_size=6, unique_by=lambda row: row[1]).map(tuple)
place_lists = st.lists(some_places, max_size=6).map(tuple)
frames_after = st.one_of(
    st.builds(Frame, st.just(Kind.PUT), rows=row_lists),
    st.builds(Frame, st.just(Kind.FREE), places=place_lists),
    st.builds(Frame, st.just(Kind.TOUCH), places=place_lists, number=st.integers(0, 0xFFFFFFFF)),
    st.builds(Frame, st.just(Kind.ASIDE), places=st.tuples(some_places), number=st.integers(0, 9)),
    st.builds(Frame, st.just(Kind.ROOT), number=st.integers(0, 255)),
    st.builds(Frame, st.just(Kind.WEAR), number=st.integers(0, 1 << 62)),
)
histories = st.builds(
    lambda rows, frames: [Frame(Kind.SNAPSHOT, rows), *frames],
    row_lists,
    st.lists(frames_after, max_size=12),
)

EXAMPLE = [
    Frame(Kind.ROOT, number=3),
    Frame(Kind.WEAR, number=12345),
    Frame(Kind.SNAPSHOT, ((11, 0, 3, 5, 0), (12, 1, 3, 6, 99), (13, 2, 3, 7, 0))),
    Frame(Kind.ASIDE, places=(3,), number=1),
    Frame(Kind.PUT, ((14, 4, 3, 8, 0), (15, 5, 3, 8, 0))),
    Frame(Kind.FREE, places=(0,)),
    Frame(Kind.TOUCH, places=(2, 1), number=9),
    Frame(Kind.PUT, ((16, 0, 3, 10, 0),)),
]


@settings(max_examples=400)
@given(frames=histories)
def test_a_replay_is_what_happened_entry_by_entry(frames: list[Frame]) -> None:
    data = bytes_of(frames)
    image = replay(data)
    assert found(image) == said(frames)
    assert image.valid_bytes == len(data)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.FREE, places=(5,)),
        Frame(Kind.TOUCH, places=(5,), number=9),
        Frame(Kind.ASIDE, places=(5,), number=1),
    ],
    ids=["free", "touch", "aside"],
)
def test_frames_of_places_that_an_empty_snapshot_does_not_know(frame: Frame) -> None:
    """The last chunk was removed, a new journal was begun, and only then its slot was free: the
    replay looked for the place among none and raised IndexError. The store could not be opened
    again."""
    frames = [Frame(Kind.SNAPSHOT), frame]
    assert found(replay(bytes_of(frames))) == said(frames)
    assert found(replay(bytes_of([*frames, put(5)]))) == said([*frames, put(5)])


def test_the_order_of_a_replay_is_that_of_leaving() -> None:
    image = replay(bytes_of(EXAMPLE))
    assert [int(tag) for tag in image.rows["tag"]] == [15, 14, 12, 13, 16]
    assert image.aside == {3: 1}
    assert image.roots == {3: root_of(3)}
    assert image.wear == EnduranceState(12345, 6172, -12338, 4115)
    assert image.num_tail == 2 + 1 + 3 + 1, "what came after the snapshot, the touch's time too"


@pytest.mark.parametrize("frames", [EXAMPLE, EXAMPLE[4:], []], ids=["whole", "tail", "empty"])
def test_a_journal_cut_off_anywhere_keeps_what_came_before(frames: list[Frame]) -> None:
    """A writer that was stopped in the middle of a frame: that frame never happened."""
    data = bytes_of(frames)
    ends = [len(bytes_of(frames[:count])) for count in range(len(frames) + 1)]
    for length in range(len(data) + 1):
        if length < len(HEAD):
            with pytest.raises(JournalError):
                replay(data[:length])
            continue
        whole = max(count for count, end in enumerate(ends) if end <= length)
        image = replay(data[:length])
        assert found(image) == said(frames[:whole])
        assert image.valid_bytes == ends[whole]


def test_a_flipped_bit_is_noticed_or_cuts_the_rest_off() -> None:
    """Never a row that nobody wrote, and never one that was overwritten since."""
    data = bytes_of(EXAMPLE)
    allowed = {len(bytes_of(EXAMPLE[:n])): said(EXAMPLE[:n]) for n in range(len(EXAMPLE) + 1)}
    num_errors = num_cut = 0
    for bit in range(8 * len(data)):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        try:
            image = replay(bytes(spoilt))
        except JournalError:
            num_errors += 1
        else:
            assert found(image) == allowed[image.valid_bytes]
            num_cut += image.valid_bytes < len(data)
    assert num_errors > 6 * len(data)
    assert num_cut < len(data)


@settings(max_examples=200)
@given(frames=histories, data=st.data())
def test_any_damage_is_noticed_or_cuts_the_rest_off(
    frames: list[Frame], data: st.DataObject
) -> None:
    """Bytes overwritten anywhere, as by a drive that lost a sector."""
    good = bytes_of(frames)
    at = data.draw(st.integers(0, len(good) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=40))
    spoilt = (good[:at] + patch + good[at + len(patch) :])[: len(good)]
    allowed = {len(bytes_of(frames[:n])): said(frames[:n]) for n in range(len(frames) + 1)}
    try:
        image = replay(spoilt)
    except JournalError:
        return
    assert found(image) == allowed[image.valid_bytes]


@pytest.mark.parametrize("tail", [bytes(4096), b"\xff" * 100, b"text\n" * 50])
def test_a_tail_that_is_no_frame(tail: bytes) -> None:
    """What a file system leaves after a power cut, zeros for example."""
    with pytest.raises(JournalError):
        replay(bytes_of(EXAMPLE) + tail)


@pytest.mark.parametrize(
    "data",
    [b"", b"SWJOURNL", bytes(100), b"STEPWELL" + HEAD[8:], HEAD[:8] + b"\2" + HEAD[9:]],
    ids=["empty", "short", "zeros", "another magic", "another version"],
)
def test_what_is_no_journal_of_this_version(data: bytes) -> None:
    with pytest.raises(JournalError):
        replay(data)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("count", [0, 2])
def test_odd_numbers_of_entries_are_no_crash(kind: Kind, count: int) -> None:
    """A frame with a right checksum and two roots in it raised struct.error, which ended the
    start; what comes from outside is checked."""
    body_bytes = {Kind.ROOT: 36, Kind.WEAR: 32, Kind.ASIDE: 16, Kind.FREE: 8, Kind.TOUCH: 8}
    body = bytes(count * body_bytes.get(kind, ENTRY.itemsize))
    try:
        image = replay(HEAD + encode(kind, body, count))
    except JournalError:
        return
    assert image.valid_bytes == len(HEAD) + 12 + len(body)


# The file.


class Noting:
    """A journal in a directory, the lock of its owner, and what was noted."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"
        self.partial = folder / "partial"
        self.lock = threading.Lock()
        self.journal = Journal(str(self.path), str(self.partial))
        self.frames: list[Frame] = []

    def note(self, frame: Frame) -> None:
        with self.lock:
            self.frames.append(frame)
            self.journal.note(frame.encoded(), max(1, len(frame.rows) + len(frame.places)))

    def renew(self) -> bool:
        return self.journal.renew(self.lock, lambda: b"".join(f.encoded() for f in self.frames))

    def replayed(self) -> tuple[Any, ...]:
        return found(replay(self.path.read_bytes()))

    def reopened(self) -> bool:
        """Go on with the file, as at a start."""
        image = replay(self.path.read_bytes())
        self.journal = Journal(str(self.path), str(self.partial))
        return self.journal.resume(image)


@pytest.fixture
def noting(tmp_path: Path) -> Iterator[Noting]:
    made = Noting(tmp_path)
    yield made
    made.journal.close()


def put(number: int) -> Frame:
    return Frame(Kind.PUT, ((number, number, 3, number, 0),))


def test_what_is_noted_is_found_after_a_flush(noting: Noting) -> None:
    assert noting.journal.broken
    assert noting.renew()
    assert not noting.journal.broken
    for frame in EXAMPLE:
        noting.note(frame)
        noting.journal.flush()
        assert noting.replayed() == said(noting.frames)
    assert noting.journal.size_bytes == noting.path.stat().st_size
    assert noting.journal.written_bytes == noting.path.stat().st_size


def test_nothing_is_written_before_a_flush_and_all_of_it_by_close(noting: Noting) -> None:
    noting.renew()
    size_bytes = noting.path.stat().st_size
    for frame in EXAMPLE:
        noting.note(frame)
    assert noting.path.stat().st_size == size_bytes
    noting.journal.close()
    assert noting.replayed() == said(EXAMPLE)
    noting.journal.close()  # harmless


@settings(max_examples=60)
@given(frames=histories, cut=st.integers(0, 200), more=st.lists(frames_after, max_size=4))
def test_a_journal_goes_on_after_its_end_was_torn(
    tmp_path_factory: pytest.TempPathFactory, frames: list[Frame], cut: int, more: list[Frame]
) -> None:
    """What is noted then does not stand behind the torn frame, where nobody would find it."""
    noting = Noting(tmp_path_factory.mktemp("torn"))
    data = bytes_of(frames)
    noting.path.write_bytes(data[: max(len(HEAD), len(data) - cut)])
    image = replay(noting.path.read_bytes())
    whole = next(n for n in range(len(frames), -1, -1)
                 if len(bytes_of(frames[:n])) <= image.valid_bytes)  # fmt: skip
    assert noting.reopened()
    for frame in more:
        noting.note(frame)
    noting.journal.close()
    assert noting.replayed() == said([*frames[:whole], *more])
    assert noting.path.stat().st_size == len(bytes_of([*frames[:whole], *more]))


def test_a_renewal_forgets_what_is_past(noting: Noting) -> None:
    noting.renew()
    for number in range(2000):
        noting.note(put(number))
        noting.note(Frame(Kind.FREE, places=(number,)))
    noting.journal.flush()
    assert noting.path.stat().st_size > 100_000
    noting.frames = EXAMPLE
    assert noting.renew()
    assert noting.path.read_bytes() == bytes_of(EXAMPLE)
    assert not noting.partial.exists()
    noting.note(put(77))
    noting.journal.flush()
    assert noting.replayed() == said([*EXAMPLE, put(77)])


def test_when_it_is_time_for_a_renewal(noting: Noting) -> None:
    """When replaying what came since would take long."""
    noting.renew()
    assert not noting.journal.long(10)
    for number in range(4097):
        noting.note(put(number))
    assert noting.journal.long(10)
    assert not noting.journal.long(20_000), "as long as it is not a quarter of the rows"
    noting.frames = noting.frames[:10]
    noting.renew()
    assert not noting.journal.long(10)


def test_a_flush_keeps_to_what_the_file_may_have(noting: Noting) -> None:
    """What does not fit stays noted, and is in the new file that is then made."""
    noting.renew()
    noting.note(put(1))
    fits_bytes = noting.journal.size_bytes + len(put(1).encoded())
    assert not noting.journal.flush(fits_bytes - 1)
    assert noting.replayed() == said([])
    assert noting.journal.flush(fits_bytes)
    assert noting.replayed() == said([put(1)])
    noting.note(put(2))
    assert not noting.journal.flush(fits_bytes)
    assert noting.renew()
    assert noting.replayed() == said([put(1), put(2)])


def test_it_remembers_over_a_restart_how_long_it_is(noting: Noting) -> None:
    noting.renew()
    for number in range(4097):
        noting.note(put(number))
    noting.journal.close()
    assert noting.reopened()
    assert noting.journal.long(10)
    assert noting.journal.size_bytes == noting.path.stat().st_size


def test_a_renewal_while_others_note_loses_nothing(noting: Noting) -> None:
    """Four threads note and flush while a fifth renews, again and again."""
    noting.renew()
    stop = threading.Event()
    renewals = [0]

    def keep_noting(first: int) -> None:
        for number in range(first, first + 150):
            noting.note(put(number))
            if number % 3 == 0:
                noting.journal.flush()

    def keep_renewing() -> None:
        while not stop.is_set():
            assert noting.renew()
            renewals[0] += 1

    threads = [threading.Thread(target=keep_noting, args=(n * 1000,)) for n in range(4)]
    renewing = threading.Thread(target=keep_renewing)
    renewing.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    renewing.join(60)
    noting.journal.flush()
    assert renewals[0] > 1
    rows, *_ = noting.replayed()
    assert rows == said(noting.frames)[0], "the order too"
    assert len(rows) == 600


class Gate:
    """`os.write` of a journal that waits at a gate."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        real = os.write

        def write(fd: int, data: Any) -> int:
            self.reached.set()
            assert self.opened.wait(30)
            return real(fd, data)

        patch.setattr(journals.os, "write", write)


@pytest.mark.parametrize("other", ["flush", "renew"])
def test_a_flush_does_not_end_before_what_was_noted_is_written(
    noting: Noting, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A flush that found nothing to write, since another thread had taken the frames and stood in
    its system call, ended at once: a chunk was reported as done that a SIGKILL could still lose,
    and a slot was written over whose former record the journal still named."""
    noting.renew()
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        noting.note(put(1))
        first = threading.Thread(target=noting.journal.flush if other == "flush" else noting.renew)
        first.start()
        try:
            assert gate.reached.wait(30)
            seen: list[tuple[Any, ...]] = []

            def flush_and_look() -> None:
                noting.journal.flush()
                seen.append(noting.replayed())

            second = threading.Thread(target=flush_and_look)
            second.start()
            second.join(0.3)  # it may have to wait for the other
        finally:
            gate.opened.set()
            first.join(30)
        second.join(30)
    assert seen == [said([put(1)])]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("after_bytes", [0, 5, 12, 44])
def test_a_journal_that_cannot_be_written_is_removed_and_made_anew(
    noting: Noting, monkeypatch: pytest.MonkeyPatch, error: int, after_bytes: int
) -> None:
    """A hint that is out of date would be worse than none."""
    noting.renew()
    noting.note(put(1))
    noting.journal.flush()
    real = os.write
    left = [after_bytes]

    def write(fd: int, data: Any) -> int:
        if not left[0]:
            raise OSError(error, os.strerror(error))
        done = real(fd, data[: left[0]])
        left[0] -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(journals.os, "write", write)
        noting.note(put(2))
        noting.note(put(3))
        noting.journal.flush()
        assert noting.journal.broken
        assert noting.journal.size_bytes == 0
        assert not noting.path.exists()
        noting.note(put(4))
        noting.journal.flush()
        assert not noting.renew()
        assert noting.journal.broken
        assert not noting.partial.exists()
    assert noting.renew()
    noting.note(put(5))
    noting.journal.flush()
    assert noting.replayed() == said([put(number) for number in range(1, 6)])


@pytest.mark.parametrize("call", ["open", "write", "replace"])
def test_a_renewal_that_fails_leaves_the_old_journal_whole(
    noting: Noting, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """With all that was noted, what the new one would have had included."""
    noting.renew()
    noting.note(put(1))
    with monkeypatch.context() as patch:
        patch.setattr(journals.os, call, no_space)
        assert not noting.renew()
    assert not noting.partial.exists()
    assert not noting.journal.broken
    noting.note(put(2))
    noting.journal.flush()
    assert noting.replayed() == said([put(1), put(2)])
    assert noting.renew()


def test_a_first_renewal_that_fails_leaves_no_journal_of_before(
    noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there says less than is so from now on, and would be believed."""
    noting.path.write_bytes(HEAD)
    monkeypatch.setattr(journals.os, "replace", no_space)
    assert not noting.renew()
    assert not noting.path.exists()
    noting.note(put(1))
    noting.journal.flush()
    assert not noting.path.exists()


def no_space(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "full")


def test_given_up_is_only_the_file_that_is_open(noting: Noting) -> None:
    """Another owner may have put one in its place meanwhile."""
    noting.renew()
    noting.path.unlink()
    noting.path.write_text("another owner's")
    noting.journal.give_up()
    assert noting.path.read_text() == "another owner's"
    assert noting.journal.broken


def test_an_abandoned_journal_keeps_no_frames(noting: Noting) -> None:
    """It is nobody's any more: they would be kept for as long as the process lives."""
    noting.renew()
    noting.note(put(1))
    noting.journal.abandon()
    assert not noting.journal.noted
    assert noting.journal.broken


def test_short_writes_go_on(noting: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(journals.os, "write", lambda fd, data: real(fd, data[:7]))
    noting.frames = EXAMPLE[:5]
    noting.renew()
    noting.frames = list(EXAMPLE[:5])
    for frame in EXAMPLE[5:]:
        noting.note(frame)
    noting.journal.flush()
    assert noting.replayed() == said(EXAMPLE)


def test_a_journal_that_cannot_be_gone_on_with(
    noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed, since nobody would keep it up to date."""
    noting.path.write_bytes(bytes_of(EXAMPLE))

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(journals.os, "ftruncate", fail)
        assert not noting.reopened()
    assert noting.journal.broken
    assert not noting.path.exists()
    noting.frames = list(EXAMPLE)
    assert noting.renew()
    assert noting.replayed() == said(EXAMPLE)


def test_no_file_is_left_open(noting: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    real = os.replace
    for fails in (False, True, False):
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(journals.os, "replace", lambda *_, **__: real("/nowhere", "/at/all"))
            assert noting.renew() != fails
    noting.journal.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_replaying_a_large_journal_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    """The time is printed and nothing depends on it."""
    import time

    count = 200_000
    rows = np.zeros(count, ENTRY)
    rows["tag"] = rows["place"] = np.arange(count)
    parts = [HEAD, encode_rows(Kind.SNAPSHOT, rows)]
    for begin in range(0, 20_000, 16):
        parts.append(encode_free(range(begin, begin + 16)))
        parts.append(encode_touch(range(begin + 16, begin + 32), begin))
    data = b"".join(parts)
    begun_s = time.perf_counter()
    image = replay(data)
    with capsys.disabled():
        print(f"\nreplayed {count} rows and their tail in {time.perf_counter() - begun_s:.2f} s")
    assert len(image.rows) == count - 20_000
