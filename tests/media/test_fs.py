"""A shared directory as a medium: the contract, and how it keeps its capacity."""

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES, Header, pad_to_page
from stepwell.errors import ConfigError
from stepwell.ops.shared import inspect_pool
from stepwell.testing import SharedTierContract, buffer_of, key_of
from stepwell.tiers.media import pool, sweep
from stepwell.tiers.media.base import Record, Wanted
from stepwell.tiers.media.fs import FsMedium, open_medium
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.sweep import PoolLimits, Sweeper
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, NO_ROOM

from .pool_member import LEAST

LONG_S = 60.0  # of a busy machine


class TestFs(SharedTierContract):
    """On the file system of the tests' directory."""

    def make_medium(self) -> FsMedium:
        self.place.mkdir(exist_ok=True)
        parameters = {"capacity": "64MiB", "min_free": "1MiB"}
        url = MediumUrl("fs", path=str(self.place / "pool"), parameters=parameters)
        medium = open_medium(url, LONG_S)
        medium.check()
        return medium

    def damage(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        path = self.place / "pool"
        (found,) = path.rglob(key[32:].hex())
        stored = found.read_bytes()
        payload_bytes = Header.unpack(stored).payload_bytes
        changed = change(stored[: HEADER_BYTES + payload_bytes])
        if len(changed) == HEADER_BYTES + payload_bytes:
            changed += bytes(HEADER_BYTES + pad_to_page(payload_bytes) - len(changed))
        found.write_bytes(changed)

    def count(self) -> int:
        return sum(1 for path in (self.place / "pool/chunks").rglob("*") if path.is_file())


# How it keeps its capacity.


class Members:
    """Processes that use one pool; all of them are ended, whatever state they are in."""

    def __init__(self, path: Path, capacity: str, lease_s: float, *, gone_s: float = 60.0) -> None:
        self.path = path
        self._arguments = (str(path), capacity)
        self._times = (str(lease_s), str(gone_s))
        self.lease_s = lease_s
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, ahead_s: float = 0.0) -> "subprocess.Popen[str]":
        """A member that writes or reads, on a host whose clock is so much ahead."""
        seed = len(self.processes)
        command = [sys.executable, "-m", "tests.media.pool_member", *self._arguments, role,
                   str(seed), *self._times, str(ahead_s)]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def end(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        """Have a member stop, and hear what it did."""
        process.terminate()
        out, _ = process.communicate(timeout=300)
        found: dict[str, Any] = json.loads(out)
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path / "pool", "32MiB", 2.0)
    yield members
    members.close()


def bytes_in(path: Path) -> int:
    """What lies in the pool, what is being written or evicted included."""
    total = 0
    for folder in ("chunks", "temp", "pool/sweeps"):
        # Folders vanish as well, which rglob does not take.
        for within, _, names in os.walk(path / folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(f"{within}/{name}")
                    total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def written_bytes(path: Path) -> int:
    """What those that are there have written, as they say."""
    return sum(member.written_bytes for member, _ in PoolFiles(path).read_members().values())


class Watch:
    """Looks at a pool again and again.

    Args:
        path: of it.
        lease_s: after which a sweeper may be replaced.

    Attributes:
        most_bytes: that have lain there.
        early: sweepers that were replaced before their lease was over, by the file system's clock.
            How often one is replaced depends on how busy the machine is; this does not.
    """

    def __init__(self, path: Path, lease_s: float) -> None:
        self.most_bytes = 0
        self.early: list[str] = []
        self._path, self._lease_s = path, lease_s
        self._epoch, self._lease_ns = 0, 0

    def on(self, seconds: float, until: Callable[[], bool] = lambda: True) -> None:
        """Look for so long, and until something is so."""
        ends_s, late_s = time.monotonic() + seconds, time.monotonic() + seconds + 300.0
        while time.monotonic() < ends_s or not until():
            assert time.monotonic() < late_s
            self.most_bytes = max(self.most_bytes, bytes_in(self._path))
            self._look_who_sweeps()
            time.sleep(0.02)

    def _look_who_sweeps(self) -> None:
        files = PoolFiles(self._path)
        epoch = files.highest_epoch()
        lease_ns = files.lease_ns(epoch) if epoch else 0
        if not lease_ns:
            return
        after_s = (lease_ns - self._lease_ns) / 1e9
        # The file system's stamps are some milliseconds coarse.
        if self._lease_ns and epoch != self._epoch and after_s < self._lease_s - 0.1:
            self.early.append(f"{self._epoch}, by {epoch} after {after_s:.2f} s")
        self._epoch, self._lease_ns = epoch, lease_ns


def sweeper_among(
    path: Path, processes: "Sequence[subprocess.Popen[str]]"
) -> "subprocess.Popen[str]":
    """Whoever sweeps; waits until somebody does."""
    found: list[subprocess.Popen[str]] = []

    def look() -> bool:
        files = PoolFiles(path)
        name = files.sweeper_of(files.highest_epoch()) if files.highest_epoch() else ""
        found.extend(each for each in processes if f"-{each.pid}-" in name)
        return bool(found)

    until(look)
    return found[0]


POOL_S = float(os.environ.get("STEPWELL_POOL_S", "8"))
IN_FLIGHT = 8 * 4 * ((256 << 10) + 4096)  # eight members, four chunks each


def test_writers_and_readers_at_capacity(members: Members) -> None:
    """Never over capacity by more than what is in flight; nobody reads half a record.

    For a while, and until twice what the pool holds was written.
    """
    writers = [members.start("write") for _ in range(4)]
    readers = [members.start("read") for _ in range(4)]
    watch = Watch(members.path, members.lease_s)
    watch.on(POOL_S, lambda: written_bytes(members.path) > 64 << 20)
    wrote = [members.end(process) for process in writers]
    read = [members.end(process) for process in readers]
    counts = {name: sum(each[name] for each in wrote + read) for name in ("written", "refused",
              "read", "absent", "wrong")}  # fmt: skip
    most_mib = watch.most_bytes / 2**20
    print(f"at capacity, {POOL_S:.0f} s: {counts}, at most {most_mib:.2f} MiB of 32")
    assert watch.most_bytes <= (32 << 20) + IN_FLIGHT
    assert watch.early == []
    assert sum(each["written"] for each in wrote) > 200, "more than the pool holds"
    assert min(each["read"] for each in read) >= LEAST
    assert [each["wrong"] for each in read] == [0] * 4
    assert [each["bad"] for each in read] == [[]] * 4
    assert bytes_in(members.path) <= 32 << 20


def epoch_of(path: Path) -> int:
    return PoolFiles(path).highest_epoch()


def until(condition: Callable[[], bool], within_s: float = 120.0) -> float:
    """How long it takes until something is so."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < within_s
        time.sleep(0.02)
    return time.monotonic() - began_s


def test_a_sweeper_that_is_killed_is_replaced(members: Members) -> None:
    """Not before its lease is over; until then the others write what they were granted."""
    for _ in range(3):
        members.start("write")
    watch = Watch(members.path, members.lease_s)
    watch.on(2.0)
    epoch, killed = epoch_of(members.path), sweeper_among(members.path, members.processes)
    killed.kill()
    watch.on(0.0, lambda: epoch_of(members.path) > epoch)
    watch.on(3.0)
    assert watch.early == []
    assert sweeper_among(members.path, members.processes) is not killed
    others = [process for process in members.processes if process is not killed]
    wrote = [members.end(process)["written"] for process in others]
    assert watch.most_bytes <= (32 << 20) + IN_FLIGHT
    assert min(wrote) >= LEAST


def test_a_sweeper_that_was_paused_finds_a_fence(members: Members) -> None:
    """Another has taken over; the first wakes up, and is one among others."""
    for _ in range(2):
        members.start("write")
    watch = Watch(members.path, members.lease_s)
    epoch, paused = epoch_of(members.path), sweeper_among(members.path, members.processes)
    paused.send_signal(signal.SIGSTOP)
    watch.on(0.0, lambda: epoch_of(members.path) > epoch)
    watch.on(1.0)
    paused.send_signal(signal.SIGCONT)
    watch.on(3.0)
    assert watch.early == [], "the first goes by who sweeps now"
    sweeps = members.path / "pool/sweeps"

    def fenced() -> bool:
        numbers = [name for name in os.listdir(sweeps) if name[0].isdecimal()]
        return numbers == [str(epoch_of(members.path))]

    until(fenced)
    assert watch.most_bytes <= (32 << 20) + IN_FLIGHT
    assert min(members.end(process)["written"] for process in members.processes) > 0


def test_clocks_an_hour_apart_do_no_harm(members: Members) -> None:
    """Ages are by the file system's clock alone, whoever sweeps."""
    for ahead_s in (3600.0, 0.0, -3600.0):
        members.start("write", ahead_s)
    reader = members.start("read", 3600.0)
    watch = Watch(members.path, members.lease_s)
    watch.on(4.0)
    assert watch.early == [], "nobody is taken for dead"
    assert watch.most_bytes <= (32 << 20) + IN_FLIGHT
    found = members.end(reader)
    assert (found["wrong"], found["bad"]) == (0, [])
    assert found["read"] >= LEAST
    now_ns = time.time_ns()
    for path in (members.path / "chunks").rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            recency_ns = max(status.st_atime_ns, status.st_mtime_ns)
            assert abs(recency_ns - now_ns) < 120e9, "touched by its host's clock"


# One after the other, in this process.


def place_records(path: Path, sizes: Sequence[int], age_s: float = 0.0) -> list[Path]:
    """Files as records are, the first the oldest."""
    made = []
    now_ns = time.time_ns()
    for idx, size_bytes in enumerate(sizes):
        folder = path / "chunks" / ("ab" * 32) / f"{idx % 3:02x}" / f"{idx % 5:02x}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{idx:08x}"
        file.write_bytes(bytes(size_bytes))
        used_ns = now_ns - int((age_s + len(sizes) - idx) * 1e9)
        os.utime(file, ns=(used_ns, used_ns))
        made.append(file)
    return made


def sweeper_at(path: Path, limits: PoolLimits, member_id: str = "some-1-ab") -> Sweeper:
    """Whoever comes next, whatever the lease of the one before."""
    files = PoolFiles(path)
    files.prepare(member_id)
    epoch = files.highest_epoch() + 1
    assert files.begin(member_id, epoch)
    return Sweeper(files, member_id, limits, epoch)


def medium_at(path: Path, capacity: str = "8MiB", **more: str) -> FsMedium:
    parameters = {"capacity": capacity, "min_free": "1MiB", **more}
    medium = open_medium(MediumUrl("fs", path=str(path), parameters=parameters), LONG_S)
    medium.check()
    return medium


def test_what_was_used_longest_ago_leaves_first(tmp_path: Path) -> None:
    """A pool that is over a lowered capacity comes down to it, the oldest first."""
    medium_at(tmp_path / "pool").close()
    made = place_records(tmp_path / "pool", [1 << 20] * 12)
    touched_ns = time.time_ns()
    os.utime(made[0], ns=(touched_ns, made[0].stat().st_mtime_ns))
    medium = medium_at(tmp_path / "pool")
    until(lambda: sum(path.exists() for path in made) <= 8)
    left = [idx for idx, path in enumerate(made) if path.exists()]
    assert left[0] == 0, "it was used since"
    assert left[1:] == list(range(12 - len(left) + 1, 12))
    medium.close()


def test_a_time_to_live_is_kept_by_whoever_sweeps(tmp_path: Path) -> None:
    medium_at(tmp_path / "pool").close()
    old = place_records(tmp_path / "pool", [4096] * 4, age_s=7200.0)
    os.utime(old[3])
    os.utime(old[0], ns=(time.time_ns(), old[0].stat().st_mtime_ns))  # used, and old all the same
    medium = medium_at(tmp_path / "pool", ttl="1h")
    until(lambda: sum(path.exists() for path in old) == 1)
    assert old[3].exists()
    medium.close()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    medium_at(tmp_path / "pool").close()
    left = [tmp_path / "pool/temp" / name for name in ("old", "new")]
    for path in left:
        path.write_bytes(b"x")
    long_ago_s = time.time() - 7200.0
    os.utime(left[0], (long_ago_s, long_ago_s))
    medium = medium_at(tmp_path / "pool")
    until(lambda: not left[0].exists())
    assert left[1].exists()
    medium.close()


def test_a_writer_without_a_sweeper_writes_what_it_was_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is refused then; nothing waits for long."""
    medium = medium_at(tmp_path / "pool")
    record = Record(key_of(0), bytes(4096), buffer_of(4096), 0.0)
    assert medium.write([record], LONG_S) == [DONE]
    monkeypatch.setattr(pool, "_WAIT_FOR_GRANT_S", 0.2)
    monkeypatch.setattr(Sweeper, "step", lambda *_, **__: True)
    outcomes = set()
    for idx in range(600):
        record = Record(key_of(f"n{idx}"), bytes(4096), buffer_of(60 << 10), 0.0)
        outcomes |= set(medium.write([record], LONG_S))
        if NO_ROOM in outcomes:
            break
    assert outcomes == {DONE, NO_ROOM}
    assert bytes_in(tmp_path / "pool") < 4 << 20
    medium.close()


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on many file systems in user space."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    medium = medium_at(tmp_path / "pool")
    record = Record(key_of(1), b"h" * 4096, buffer_of(4096, b"p"), 0.0)
    assert medium.write([record], LONG_S) == [DONE]
    assert medium.write([record], LONG_S) == [ALREADY_THERE]
    payload = buffer_of(4096)
    assert medium.read([Wanted(key_of(1), payload)], LONG_S) == [b"h" * 4096]
    assert payload[:1] == b"p"
    medium.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fs://mnt/pool?capacity=1GiB", "three slashes"),
        ("fs:///?capacity=1GiB", "three slashes"),
        ("fs:///mnt/pool", "fs:///mnt/pool?capacity=10TiB"),
        ("fs:///mnt/pool?capacity=10", "needs a unit"),
        ("fs:///mnt/pool?capacity=1KiB", "at least 1MiB"),
        ("fs:///mnt/pool?capacity=1GiB&ttl=1", "time with a unit"),
        ("fs:///mnt/pool?capcity=1GiB", 'the nearest is "capacity"'),
    ],
)
def test_a_wrong_url(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_medium(MediumUrl.parse(text), 1.0)
    assert words in str(refused.value)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        medium_at(tmp_path / "none" / "pool")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        medium_at(tmp_path / "file")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").touch()
    with pytest.raises(ConfigError, match="something else"):
        medium_at(full)
    other = tmp_path / "other"
    other.mkdir()
    (other / "stepwell-pool.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="another version"):
        medium_at(other)


def test_a_pool_that_is_made_by_two_at_once(tmp_path: Path) -> None:
    threads = []
    made: list[FsMedium] = []
    for _ in range(6):
        threads.append(threading.Thread(target=lambda: made.append(medium_at(tmp_path / "pool"))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len(made) == 6
        until(lambda: epoch_of(tmp_path / "pool") == 1)
    finally:
        for medium in made:
            medium.close()


def resident_bytes() -> int:
    """What this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_many_records_are_counted_and_swept_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STEPWELL_POOL_FILES says how many; a million takes minutes to make."""
    num_files = int(os.environ.get("STEPWELL_POOL_FILES", "20000"))
    size_bytes = num_files * 4096
    monkeypatch.setattr(sweep, "_MAX_CANDIDATES", min(1 << 16, num_files // 8))
    medium_at(tmp_path / "pool", "1GiB").close()
    root = "ab" * 32
    for idx in range(num_files):
        folder = tmp_path / f"pool/chunks/{root}/{idx % 256:02x}/{idx // 256 % 16:02x}"
        if idx < 4096:
            folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{idx:064x}", "wb") as file:
            file.truncate(4096)  # which takes no room
    before_bytes = resident_bytes()
    sweeper = sweeper_at(tmp_path / "pool", PoolLimits(size_bytes * 3 // 4, 0, 0.0))
    began_s = time.monotonic()
    while sweeper.quota.counted_bytes is None:
        assert sweeper.step(time.time_ns())
    counted_s = time.monotonic() - began_s
    most_bytes = resident_bytes()
    assert sweeper.quota.counted_bytes == size_bytes
    while sweeper.quota.room_bytes < 0:
        assert sweeper.step(time.time_ns())
        most_bytes = max(most_bytes, resident_bytes())
    swept_s = time.monotonic() - began_s - counted_s
    print(f"{num_files} records counted in {counted_s:.1f} s, {sweeper.num_evicted} evicted in "
          f"{swept_s:.1f} s, {(most_bytes - before_bytes) / 2**20:.1f} MiB of memory")  # fmt: skip
    left = inspect_pool(tmp_path / "pool")
    assert left.size_bytes <= size_bytes * 3 // 4
    assert left.num_chunks == num_files - sweeper.num_evicted
    assert most_bytes - before_bytes < 128 << 20
