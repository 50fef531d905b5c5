"""Whoever empties a pool, stopped, killed or failed at every single system call."""

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.tiers import files as careful
from stepwell.tiers.media import books as telling
from stepwell.tiers.media import census, poolfiles, sweep
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.quota import Member
from stepwell.tiers.media.sweep import LeaseWatch, PoolLimits, Sweeper, elect

KIB = 1 << 10
RECORD = 128 * KIB
LIMITS = PoolLimits(1 << 20, 0, 0.0)
SILENT = 30 * KIB
MODULES = (sweep, poolfiles, telling, census, careful)
NOT_CALLS = ("fsencode", "fspath", "strerror")


class Between:
    """``os``, for some modules, with something done just before this thread's n-th call."""

    def __init__(self, at: int, do: Callable[[], None]) -> None:
        self.num_calls = 0
        self._at = at
        self._do = do
        self._busy = False
        self._thread_id = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name in NOT_CALLS or name[0].isupper() or not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._busy and threading.get_ident() == self._thread_id:
                self.num_calls += 1
                if self.num_calls == self._at:
                    self._busy = True
                    try:
                        self._do()
                    finally:
                        self._busy = False
            return found(*args, **kwargs)

        return call


@contextlib.contextmanager
def between(at: int, do: Callable[[], None]) -> Iterator[Between]:
    fake = Between(at, do)
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "os", fake)
        yield fake


class Scene:
    """A pool over its capacity, a member that wants more, and books of an epoch before."""

    def __init__(self, path: Path, *, num_records: int = 12, counted: bool = True) -> None:
        path.mkdir()
        (path / "stepwell-pool.json").write_text(json.dumps({"format": 1, "pool": "ab" * 16}))
        self.path = path
        self.files = PoolFiles(path)
        self.files.make_folders()
        self.records = []
        now_ns = time.time_ns()
        for idx in range(num_records):
            folder = path / f"chunks/{'ab' * 32}/{idx % 2:02x}/{idx % 3:02x}"
            folder.mkdir(parents=True, exist_ok=True)
            record = folder / f"{idx:08x}"
            record.write_bytes(bytes(RECORD))
            used_ns = now_ns - (num_records - idx) * 10**9
            os.utime(record, ns=(used_ns, used_ns))
            self.records.append(record)
        self.member = Member(0, 300 * KIB, 0, LIMITS.capacity_bytes)
        self.files.write_member("writer-1-aa", self.member)
        for member_id in ("old-1-aa", "new-1-aa"):
            self.files.prepare(member_id)
        first = self.begin("first-1-aa", "first-1-aa")
        first.quota.granted["silent-1-aa"] = SILENT  # to somebody who has not been heard of
        first.quota.base["silent-1-aa"] = 0
        if counted:
            assert first.step(time.time_ns())

    def begin(self, member_id: str, prepare: str = "") -> Sweeper:
        """The next epoch, whatever the lease of the one before."""
        if prepare:
            self.files.prepare(prepare)
        epoch = self.files.highest_epoch() + 1
        assert self.files.begin(member_id, epoch)
        return Sweeper(self.files, member_id, LIMITS, epoch)

    def present(self) -> set[Path]:
        return {path for path in self.records if path.exists()}

    def bytes_in(self) -> int:
        """Records, and what is being evicted."""
        found = [*self.present(), *(self.path / "pool/sweeps").glob("*/[0-9]*")]
        return sum(path.lstat().st_size for path in found if path.name.isdecimal() or path.exists())

    def told(self) -> dict[str, int]:
        """What members may have heard that they were granted, at most."""
        most: dict[str, int] = {}
        for path in (self.path / "pool/sweeps").glob("[0-9]*/*.json"):
            for name, granted in json.loads(path.read_text())["granted"].items():
                most[name] = max(most.get(name, 0), granted)
        return most


def life(scene: Scene) -> None:
    """Of a sweeper: it begins, counts, evicts, grants."""
    if not scene.files.begin("old-1-aa", 2):
        return
    sweeper = Sweeper(scene.files, "old-1-aa", LIMITS, 2)
    for _ in range(4):
        if not sweeper.step(time.time_ns()):
            return


def num_calls_of_a_life(path: Path) -> int:
    scene = Scene(path)
    with between(0, lambda: None) as calls:
        life(scene)
    assert len(scene.present()) <= 8, "it has evicted"
    books = scene.files.read_books(2)
    assert books is not None
    assert books.granted["writer-1-aa"] > 0, "and granted"
    assert calls.num_calls > 100
    return calls.num_calls


def serve(sweeper: Sweeper, steps: int = 6) -> None:
    for _ in range(steps):
        assert sweeper.step(time.time_ns())


def test_one_that_sleeps_at_any_point_evicts_and_grants_nothing_any_more(tmp_path: Path) -> None:
    """SIGSTOP at any system call; another takes over; SIGCONT."""
    for at in range(1, num_calls_of_a_life(tmp_path / "whole") + 1):
        scene = Scene(tmp_path / f"at{at}")
        seen: dict[str, Any] = {}

        def take_over(scene: Scene = scene, seen: dict[str, Any] = seen) -> None:
            told = scene.told()
            new = scene.begin("new-1-aa")
            for name, granted in told.items():
                assert new.quota.granted[name] >= granted, "what was granted stays granted"
            seen["new"] = new
            seen["present"] = scene.present()
            seen["told"] = scene.told()

        # It may fail, and that is a failed turn.
        with contextlib.suppress(OSError), between(at, take_over):
            life(scene)
        assert scene.present() >= seen["present"], f"evicted: at={at}"
        assert scene.told() == seen["told"], f"granted: at={at}"
        serve(seen["new"])
        quota = seen["new"].quota
        assert quota.granted["silent-1-aa"] >= SILENT
        assert scene.bytes_in() <= quota.used_bytes <= LIMITS.capacity_bytes
        numbers = [n for n in os.listdir(scene.files.sweeps) if n[0].isdecimal()]
        assert numbers == [str(seen["new"].epoch)], f"left: at={at}"


class Killed(BaseException):
    """SIGKILL."""


def test_one_that_is_killed_at_any_point_is_replaced(tmp_path: Path) -> None:
    for at in range(1, num_calls_of_a_life(tmp_path / "whole") + 1):
        scene = Scene(tmp_path / f"at{at}")

        def die() -> None:
            raise Killed

        told = scene.told()
        with contextlib.suppress(Killed), between(at, die):
            life(scene)
        told.update(scene.told())
        scene.files.prepare("new-1-aa")
        new = scene.begin("new-1-aa")
        for name, granted in told.items():
            assert new.quota.granted[name] >= granted, f"books: at={at} name={name}"
        serve(new)
        assert scene.bytes_in() <= new.quota.used_bytes <= LIMITS.capacity_bytes, f"at={at}"
        assert [n for n in os.listdir(scene.files.sweeps) if n[0].isdecimal()] == [str(new.epoch)]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES])
def test_any_call_may_fail_once(tmp_path: Path, number: int) -> None:
    """Nothing is forgotten, and the next turns set it right; or another takes over."""
    for at in range(1, num_calls_of_a_life(tmp_path / "whole") + 1):
        scene = Scene(tmp_path / f"at{at}")

        def fail() -> None:
            raise OSError(number, os.strerror(number))

        told = scene.told()
        with contextlib.suppress(OSError), between(at, fail):
            life(scene)
        told.update(scene.told())
        scene.files.prepare("new-1-aa")
        new = scene.begin("new-1-aa")
        for name, granted in told.items():
            assert new.quota.granted[name] >= granted, f"books: at={at} name={name}"
        serve(new)
        assert scene.bytes_in() <= new.quota.used_bytes <= LIMITS.capacity_bytes, f"at={at}"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sweeper_goes_on_after_any_call_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The same one, as long as nobody else has begun."""
    monkeypatch.setattr(sweep, "_COUNT_AGAIN_S", 0.0)
    scene = Scene(tmp_path / "whole")
    sweeper = scene.begin("old-1-aa")
    with between(0, lambda: None) as calls:
        serve(sweeper, 4)
    for at in range(1, calls.num_calls + 1, 2):
        scene = Scene(tmp_path / f"at{at}")
        sweeper = scene.begin("old-1-aa")

        def fail() -> None:
            raise OSError(number, os.strerror(number))

        with between(at, fail):
            for _ in range(4):
                with contextlib.suppress(OSError):
                    assert sweeper.step(time.time_ns()), f"it has given up: at={at}"
        serve(sweeper)
        assert scene.bytes_in() <= sweeper.quota.used_bytes <= LIMITS.capacity_bytes, f"at={at}"


def test_books_without_room_stay_until_they_are_told_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sweeper that took over on a full file system had removed the only copy there was."""
    monkeypatch.setattr(sweep, "_TELL_EVERY_S", 0.0)
    scene = Scene(tmp_path / "pool")
    told = scene.told()
    real = PoolFiles.write_books
    is_full = [True]

    def write_books(self: PoolFiles, books: telling.Books) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, books)

    monkeypatch.setattr(PoolFiles, "write_books", write_books)
    for member_id in ("old-1-aa", "new-1-aa"):  # the first is killed in the end
        sweeper = scene.begin(member_id)
        serve(sweeper)
        for name, granted in told.items():
            assert sweeper.quota.granted[name] >= granted
            assert scene.told()[name] >= granted
    assert caplog.text.count("no room to tell") == 2, "once for each, not every time"
    assert scene.files.read_books(sweeper.epoch) is None
    is_full[0] = False
    serve(sweeper, 1)
    books = scene.files.read_books(sweeper.epoch)
    assert books is not None
    assert books.granted == sweeper.quota.granted, "what was granted without room is told"
    assert books.granted["writer-1-aa"] == 300 * KIB
    names = sorted(os.listdir(scene.files.sweep_folder(sweeper.epoch)))
    assert names == ["grants.json", "new-1-aa.lease"]


def test_a_grant_that_could_not_be_told_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second later, and not by every turn until then; also where nothing else changes."""
    scene = Scene(tmp_path / "pool", num_records=2)
    sweeper = scene.begin("old-1-aa")
    serve(sweeper)
    member = Member(0, 400 * KIB, 0, LIMITS.capacity_bytes)
    scene.files.write_member("writer-1-aa", member)
    real, tries = PoolFiles.write_books, []

    def write_books(self: PoolFiles, books: telling.Books) -> None:
        tries.append(books.told)
        if len(tries) == 1:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(self, books)

    monkeypatch.setattr(PoolFiles, "write_books", write_books)
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    serve(sweeper)
    assert len(tries) == 1
    now_s[0] += 1.5
    serve(sweeper, 1)
    books = scene.files.read_books(sweeper.epoch)
    assert books is not None
    assert books.granted["writer-1-aa"] == 400 * KIB


def test_of_two_books_of_one_epoch_the_last_told_counts(tmp_path: Path) -> None:
    """One that slept has told once more into its folder while that was being emptied."""
    for turn in range(8):  # they get random names, and are read in any order
        scene = Scene(tmp_path / f"pool{turn}")
        sweeper = scene.begin("old-1-aa")
        early = Path(scene.files.sweep_folder(2), "grants.json").read_bytes()
        serve(sweeper)
        assert sweeper.quota.granted["writer-1-aa"] == 300 * KIB
        Path(scene.files.sweep_folder(2), "early.json").write_bytes(early)
        new = scene.begin("new-1-aa")
        assert new.quota.granted["writer-1-aa"] == 300 * KIB


def test_two_cannot_begin_the_same_epoch(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pool")
    assert scene.files.begin("old-1-aa", 2)
    assert not scene.files.begin("new-1-aa", 2)
    assert scene.files.sweeper_of(2) == "old-1-aa"


def test_who_begins_an_epoch_that_is_over_has_not_begun(tmp_path: Path) -> None:
    """It had looked before others came and went."""
    scene = Scene(tmp_path / "pool")
    scene.begin("old-1-aa")
    scene.begin("third-1-aa", "third-1-aa")
    assert not scene.files.begin("new-1-aa", 2)
    assert [n for n in os.listdir(scene.files.sweeps) if n[0].isdecimal()] == ["3"]


# Leases.


def test_a_lease_is_over_when_it_was_not_renewed(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pool")
    watch = LeaseWatch()
    now_ns = scene.files.lease_ns(1)
    soon_ns = now_ns + int((sweep.LEASE_S - 1) * 1e9)
    later_ns = now_ns + int((sweep.LEASE_S + 1) * 1e9)
    assert elect(scene.files, "old-1-aa", LIMITS, watch, soon_ns) is None
    assert elect(scene.files, "old-1-aa", LIMITS, watch, later_ns) is not None


def test_another_sweeper_of_the_same_number_is_another(tmp_path: Path) -> None:
    """A pool was put in the place of this one while its sweeper was at work."""
    scene, other = Scene(tmp_path / "pool"), Scene(tmp_path / "other")
    old = scene.begin("old-1-aa")
    other.begin("third-1-aa", "third-1-aa")
    scene.path.rename(tmp_path / "away")
    other.path.rename(scene.path)
    before = scene.told()
    assert not old.step(time.time_ns())
    assert scene.told() == before


def test_who_resigns_is_replaced_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pool")
    old = scene.begin("old-1-aa")
    old.resign()
    now_ns = time.time_ns()
    new = elect(scene.files, "new-1-aa", LIMITS, LeaseWatch(), now_ns)
    assert new is not None
    assert new.epoch == 3
    old.resign()  # which is not its affair any more
    assert elect(scene.files, "other-1-aa", LIMITS, LeaseWatch(), now_ns) is None


def test_of_several_books_the_last_count(tmp_path: Path) -> None:
    """Whoever took over before was killed when it had told its own, and not yet removed others."""
    scene = Scene(tmp_path / "pool", num_records=2, counted=False)
    old = scene.begin("old-1-aa")
    first = Path(scene.files.sweep_folder(2), "inherited.json")
    first.write_bytes(Path(scene.files.sweep_folder(2), "grants.json").read_bytes())
    first.write_text(first.read_text().replace('"epoch": 2', '"epoch": 1'))
    serve(old)
    new = scene.begin("new-1-aa")
    assert new.quota.granted["writer-1-aa"] == 300 * KIB
    assert sorted(os.listdir(scene.files.sweep_folder(3))) == ["grants.json", "new-1-aa.lease"]


def test_a_file_system_whose_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of one who died lies in the future; as it never changes, it is over."""
    watch = LeaseWatch()
    hour_ns = 3600 * 10**9
    assert not watch.is_over(5, 2 * hour_ns, hour_ns)
    began_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_s + sweep.LEASE_S - 1)
    assert not watch.is_over(5, 2 * hour_ns, hour_ns)
    monkeypatch.setattr(time, "monotonic", lambda: began_s + sweep.LEASE_S + 1)
    assert watch.is_over(5, 2 * hour_ns, hour_ns)
    assert not watch.is_over(5, 2 * hour_ns + 1, hour_ns), "it has been renewed"


# Members.


def test_a_member_is_gone_when_its_pulse_stands_still_and_not_when_it_looks_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is of another year by the clock of whoever sweeps; only that it changes counts."""
    scene = Scene(tmp_path / "pool")
    path = Path(scene.files.members, "writer-1-aa.json")
    sweeper = scene.begin("new-1-aa")
    serve(sweeper)
    granted = sweeper.quota.granted["writer-1-aa"]
    assert granted == 300 * KIB
    began_s = time.monotonic()
    for idx in range(10):
        os.utime(path, (idx, idx))
        monkeypatch.setattr(time, "monotonic", lambda at=idx: began_s + 30.0 * at)
        assert sweeper.step(time.time_ns() + 10**18)
        assert path.exists()
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 400.0)
    used_bytes = sweeper.quota.used_bytes
    assert sweeper.step(time.time_ns())
    assert not path.exists()
    assert "writer-1-aa" not in sweeper.quota.granted
    assert sweeper.quota.used_bytes <= used_bytes
    books = scene.files.read_books(sweeper.epoch)
    assert books is not None
    assert "writer-1-aa" not in books.granted, "it hears of it, should it come back"


def test_what_a_member_that_is_gone_did_not_use_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path / "pool", num_records=2)
    sweeper = scene.begin("new-1-aa")
    serve(sweeper)
    assert sweeper.quota.used_bytes == 2 * RECORD + 300 * KIB + SILENT
    began_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 100.0)
    serve(sweeper)
    assert sweeper.quota.granted == {}
    assert sweeper.quota.used_bytes == 2 * RECORD + 300 * KIB + SILENT, (
        "they may have written all of it"
    )
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 800.0)
    serve(sweeper)
    assert sweeper.quota.used_bytes == 2 * RECORD


def test_who_left_is_charged_until_it_is_counted_and_then_forgotten(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pool", num_records=2)
    sweeper = scene.begin("new-1-aa")
    serve(sweeper)
    assert sweeper.quota.granted["writer-1-aa"] == 300 * KIB
    departed_bytes = sweeper.quota.departed_bytes
    left = Member(200 * KIB, 300 * KIB, 0, LIMITS.capacity_bytes, has_left=True)
    scene.files.write_member("writer-1-aa", left)
    serve(sweeper)
    assert sweeper.quota.granted["writer-1-aa"] == 200 * KIB, "the rest is anybody's"
    assert sweeper.quota.departed_bytes == departed_bytes, "it is known what it wrote"
    scene.files.ask_for_count()
    serve(sweeper)
    assert "writer-1-aa" not in sweeper.quota.granted
    assert "writer-1-aa" not in scene.files.read_members()
    assert sweeper.quota.used_bytes == 2 * RECORD + SILENT


def test_a_count_that_was_asked_for_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path / "pool", num_records=2)
    sweeper = scene.begin("new-1-aa")
    serve(sweeper)
    counts = []
    real = sweep.roots
    monkeypatch.setattr(sweep, "roots", lambda chunks: counts.append(chunks) or real(chunks))
    for number in range(1, 3):
        scene.files.ask_for_count()
        serve(sweeper, 12)
        assert len(counts) == number


# Making room.


def test_what_others_have_removed_is_counted_again_before_more_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root was erased: there is room, although the books say that there is none."""
    monkeypatch.setattr(sweep, "_MOST_MISSING", 2)
    scene = Scene(tmp_path / "pool", num_records=7)
    sweeper = scene.begin("new-1-aa")
    serve(sweeper, 2)
    assert len(scene.present()) >= 4
    left = sorted(scene.present())
    by_age = [path for path in scene.records if path in left]
    for path in by_age[:3]:
        path.unlink()
    member = Member(0, 600 * KIB, 0, LIMITS.capacity_bytes)
    scene.files.write_member("writer-1-aa", member)
    serve(sweeper)
    assert scene.present() == set(by_age[3:])
    assert sweeper.quota.granted["writer-1-aa"] == 600 * KIB


def test_what_was_used_since_it_was_counted_stays(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pool")
    sweeper = scene.begin("old-1-aa")
    while not sweeper.candidates:
        assert sweeper.step(time.time_ns())
    oldest = Path(sweeper.candidates[-1])
    os.utime(oldest, ns=(time.time_ns(), oldest.stat().st_mtime_ns))
    serve(sweeper)
    assert oldest.exists()
    assert sweeper.num_evicted > 2


def test_a_sweeper_that_cannot_write_a_small_file_makes_room(tmp_path: Path) -> None:
    """A quota is used up, and neither the file system nor the books know of it."""
    scene = Scene(tmp_path / "pool", num_records=2)
    sweeper = scene.begin("old-1-aa")
    serve(sweeper)
    assert len(scene.present()) == 2
    assert sweeper.step(time.time_ns(), is_full=True)
    serve(sweeper)
    assert len(scene.present()) == 1
    for _ in range(3):
        assert sweeper.step(time.time_ns(), is_full=True)
        serve(sweeper)
    assert not sweeper.busy, "where there is nothing left it does not go on counting"


def test_what_is_over_and_cannot_be_removed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's files must not keep a pool from being counted."""
    scene = Scene(tmp_path / "pool", num_records=4, counted=False)
    for path in scene.records[:2]:
        os.utime(path, (1e9, 1e9))
    stuck = str(scene.records[0])
    real = os.rename

    def rename(source: str, target: str) -> None:
        if source == stuck:
            raise PermissionError(errno.EACCES, "Permission denied", source)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    limits = PoolLimits(1 << 20, 0, 3600.0)
    scene.files.prepare("ttl-1-aa")
    assert scene.files.begin("ttl-1-aa", 2)
    sweeper = Sweeper(scene.files, "ttl-1-aa", limits, 2)
    serve(sweeper)
    assert scene.present() == set(scene.records) - {scene.records[1]}
    assert sweeper.quota.counted_bytes == 3 * RECORD


def test_what_cannot_be_evicted_does_not_keep_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path / "pool")
    stuck = str(scene.records[0])
    real = os.rename

    def rename(source: str, target: str) -> None:
        if source == stuck:
            raise PermissionError(errno.EACCES, "Permission denied", source)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    sweeper = scene.begin("old-1-aa")
    serve(sweeper)
    assert scene.records[0].exists()
    assert scene.bytes_in() <= sweeper.quota.used_bytes <= LIMITS.capacity_bytes
    assert sweeper.quota.granted["writer-1-aa"] == 300 * KIB


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    """Somebody has moved a part of the pool elsewhere, or wants us to remove what is his."""
    scene = Scene(tmp_path / "pool")
    outside = tmp_path / "outside"
    folder = scene.records[0].parent
    folder.rename(outside)
    sweeper = scene.begin("old-1-aa")
    folder.symlink_to(outside)
    serve(sweeper)
    assert scene.records[0].exists()
    assert sweeper.quota.counted_bytes is not None
    inside = sum(1 for path in scene.records if path.exists() and not path.parent.is_symlink())
    assert scene.bytes_in() - (len(scene.present()) - inside) * RECORD <= LIMITS.capacity_bytes
    # And one that comes to be a link after it was counted.
    scene = Scene(tmp_path / "other")
    sweeper = scene.begin("old-1-aa")
    while not sweeper.candidates:
        sweeper.step(time.time_ns())
    oldest = Path(sweeper.candidates[-1])
    oldest.parent.rename(tmp_path / "elsewhere")
    oldest.parent.symlink_to(tmp_path / "elsewhere")
    kept = set((tmp_path / "elsewhere").iterdir())
    assert kept
    serve(sweeper)
    assert set((tmp_path / "elsewhere").iterdir()) == kept


def test_folders_that_are_empty_for_long_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every root of a model that nobody uses any more would leave 65,536 of them."""
    scene = Scene(tmp_path / "pool", num_records=2)
    old = Path(scene.files.chunks, "cd" * 32, "00", "00")
    new = Path(scene.files.chunks, "ef" * 32, "00", "00")
    for folder in (old, new):
        folder.mkdir(parents=True)
    for folder in (old, old.parent, old.parent.parent):
        os.utime(folder, (1e9, 1e9))
    serve(scene.begin("old-1-aa"))
    assert not old.exists()
    assert new.exists()
    assert len(scene.present()) == 2


def test_a_folder_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known is not granted; and it is tried again."""
    monkeypatch.setattr(sweep, "_COUNT_AGAIN_S", 0.0)
    scene = Scene(tmp_path / "pool", counted=False)
    sweeper = scene.begin("old-1-aa")
    bad = scene.records[0].parent
    real = careful.opened_folder

    def opened(path: str, parent: int | None = None) -> Any:
        if path == str(bad):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, parent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "opened_folder", opened)
        for _ in range(5):
            with pytest.raises(PermissionError):
                sweeper.step(time.time_ns())
        assert sweeper.quota.counted_bytes is None
        assert sweeper.quota.granted["writer-1-aa"] == 0
    serve(sweeper)
    assert sweeper.quota.counted_bytes is not None


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("what", ["chunks", "root", "spread", "folder", "record"])
def test_a_count_that_is_cut_short_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """A handle of NFS was stale, and what was left of the listing was taken for all there is."""
    monkeypatch.setattr(sweep, "_COUNT_AGAIN_S", 0.0)
    scene = Scene(tmp_path / "pool", num_records=6, counted=False)
    sweeper = scene.begin("old-1-aa")
    record = scene.records[0]
    paths = {"chunks": record.parents[3], "root": record.parents[2], "spread": record.parents[1],
             "folder": record.parent}  # fmt: skip
    real_opened, real_scandir = careful.opened_folder, os.scandir

    def opened(path: str, parent: int | None = None) -> Any:
        if path == str(paths.get(what)):
            raise OSError(number, os.strerror(number), path)
        return real_opened(path, parent)

    class Stale:
        """An entry of a directory."""

        def __init__(self, found: Any) -> None:
            self.name, self.is_dir = found.name, found.is_dir
            self._found = found

        def stat(self, *, follow_symlinks: bool) -> Any:
            if what == "record" and self.name == record.name:
                raise OSError(number, os.strerror(number))
            return self._found.stat(follow_symlinks=follow_symlinks)

    @contextlib.contextmanager
    def scandir(fd: int) -> Iterator[Any]:
        with real_scandir(fd) as found:
            yield map(Stale, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "opened_folder", opened)
        patch.setattr(os, "scandir", scandir)
        for _ in range(3):
            with pytest.raises(OSError, match=os.strerror(number)):
                sweeper.step(time.time_ns())
        assert sweeper.quota.counted_bytes is None
    serve(sweeper)
    assert sweeper.quota.counted_bytes == 6 * RECORD


def test_a_pool_without_its_chunks_is_no_empty_one(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pool", num_records=2, counted=False)
    sweeper = scene.begin("old-1-aa")
    os.rename(scene.files.chunks, tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        sweeper.step(time.time_ns())
    assert sweeper.quota.counted_bytes is None


def test_what_is_over_and_may_still_be_there_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path / "pool", num_records=4, counted=False)
    os.utime(scene.records[0], (1e9, 1e9))
    real = os.rename

    def rename(source: str, target: str) -> None:
        if source == str(scene.records[0]):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), source)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert scene.files.begin("old-1-aa", 2)
    sweeper = Sweeper(scene.files, "old-1-aa", PoolLimits(1 << 20, 0, 3600.0), 2)
    serve(sweeper)
    assert sweeper.quota.counted_bytes == 4 * RECORD


FOREIGN = (
    ".Trash-0/00/00/00ff",
    "AB" * 32 + "/00/00/00ff",
    "ab" * 31 + "/00/00/00ff",
    "ab" * 32 + "/0/00/00ff",
    "ab" * 32 + "/00/0x/00ff",
    "ab" * 32 + "/00/00/00ff.partial",
    "ab" * 32 + "/00/00/.nfs00ff",
    "ab" * 32 + "/00/00/00f",
    "ab" * 32 + "/00/00/" + "0" * 130,
)


def test_what_has_another_name_is_neither_read_nor_counted_nor_removed(tmp_path: Path) -> None:
    """Somebody else's, however old; and a folder that nobody here may read."""
    scene = Scene(tmp_path / "pool", num_records=2, counted=False)
    foreign = [Path(scene.files.chunks, name) for name in FOREIGN]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(RECORD))
        os.utime(path, (1e9, 1e9))
    real = careful.opened_folder

    def opened(path: str, parent: int | None = None) -> Any:
        if ".Trash" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, parent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "opened_folder", opened)
        assert scene.files.begin("old-1-aa", 2)
        sweeper = Sweeper(scene.files, "old-1-aa", PoolLimits(1 << 20, 0, 3600.0), 2)
        serve(sweeper)
        assert sweeper.quota.counted_bytes == 2 * RECORD
        for _ in range(3):
            assert sweeper.step(time.time_ns(), is_full=True)
            serve(sweeper)
    assert scene.present() == set(), "room was made of what is the pool's"
    assert [path for path in foreign if not path.exists()] == []


# What lies in the pool's own folders and is not what it should be.

GARBAGE: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "no table": lambda path: path.write_text("[1, 2]"),
    "texts": lambda path: path.write_text('{"written": "1", "granted": {"a": "b"}}'),
    "truth": lambda path: path.write_text('{"written": true, "wanted": null, "granted": true}'),
    "below zero": lambda path: path.write_text('{"written": -1, "granted": {"a": -5}}'),
    "beyond measure": lambda path: path.write_text(
        '{"written": 1' + "0" * 400 + ', "counted": 1e400, "granted": {"a": NaN}}'
    ),
    "deep": lambda path: path.write_text("[" * 100_000),
    "large": lambda path: path.write_bytes(b" " * (2 << 20)),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_member_file_that_is_none(tmp_path: Path, kind: str) -> None:
    scene = Scene(tmp_path / "pool")
    GARBAGE[kind](Path(scene.files.members, "bad-1-aa.json"))
    sweeper = scene.begin("old-1-aa")
    serve(sweeper)
    assert sweeper.quota.granted["writer-1-aa"] == 300 * KIB
    assert "bad-1-aa" not in sweeper.quota.granted
    assert scene.bytes_in() <= LIMITS.capacity_bytes


@pytest.mark.parametrize("kind", GARBAGE)
def test_books_that_are_none(tmp_path: Path, kind: str) -> None:
    """They are as good as lost: it is counted first, and granted then."""
    scene = Scene(tmp_path / "pool")
    path = Path(scene.files.sweep_folder(1), "grants.json")
    path.unlink()
    GARBAGE[kind](path)
    if kind == "a folder":
        (path / "more").mkdir()
    sweeper = scene.begin("old-1-aa")
    serve(sweeper)
    assert sweeper.quota.granted["writer-1-aa"] == 300 * KIB
    assert scene.bytes_in() <= sweeper.quota.used_bytes <= LIMITS.capacity_bytes
    assert [n for n in os.listdir(scene.files.sweeps) if n[0].isdecimal()] == ["2"]


def test_strays_among_the_sweeps(tmp_path: Path) -> None:
    """Names that are no epochs, and links and files where an epoch's folder would be."""
    scene = Scene(tmp_path / "pool")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    sweeps = Path(scene.files.sweeps)
    (sweeps / "٣").mkdir()
    (sweeps / "007").mkdir()
    (sweeps / "2").symlink_to(outside)
    (sweeps / "3").write_text("x")
    sweeper = scene.begin("old-1-aa")
    assert sweeper.epoch == 4
    serve(sweeper)
    assert (outside / "precious").exists()
    assert not (sweeps / "2").is_symlink()
    assert not (sweeps / "3").exists()


def test_what_members_that_are_gone_were_writing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a member that is there writes stays, however long that takes."""
    scene = Scene(tmp_path / "pool", counted=False)
    temp = Path(scene.files.temp)
    names = {"writer-1-aa-7": 1e9, "gone-1-aa-7": 1e9, "gone-1-aa-8": time.time()}
    for name, at_s in names.items():
        (temp / name).write_bytes(b"x")
        os.utime(temp / name, (at_s, at_s))
    part = Path(scene.files.sweeps, "part-gone-1-aa")
    part.write_text("{")
    os.utime(part, (1e9, 1e9))
    serve(scene.begin("old-1-aa"))
    assert sorted(os.listdir(temp)) == ["gone-1-aa-8", "writer-1-aa-7"]
    assert not part.exists()
