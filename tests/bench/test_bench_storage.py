"""The storage benchmark: what it moves, what it computes, and that it leaves nothing behind.

Values are tested, never times.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import pytest

from stepwell import cli
from stepwell.bench import machine, rawio, storage
from stepwell.bench.payloads import Payloads
from stepwell.bench.progress import Progress
from stepwell.bench.rawio import FilePerChunk, RawFile, copy_memory, direct_works, run_parallel
from stepwell.bench.results import percentile
from stepwell.bench.storage import StorageTier, check_options, run_storage
from stepwell.bench.storage_options import StorageOptions
from stepwell.bench.storage_report import storage_json, storage_text
from stepwell.bench.storage_results import (
    CHECKSUM,
    FILE_PER_CHUNK,
    FIRST_FILL,
    MEMORY_COPY,
    RAW,
    READ,
    TIER,
    WRITE,
    Row,
    Section,
    StorageResult,
    make_row,
    notes,
    promises,
)
from stepwell.core.keys import Key
from stepwell.core.record import record_bytes
from stepwell.core.types import ChunkResult, Direction, Job, JobResult, Lookup, Outcome, Reason
from stepwell.errors import ConfigError, DataError, TierError

MIB = 1 << 20
SMALL = ("--size", "32MiB", "--chunk", "1MiB", "--jobs", "4", "--rounds", "2")
ROW_KEYS = {
    "op", "chunk_bytes", "jobs", "tier_gbps", "raw_gbps", "ratio", "file_per_chunk_gbps",
    "cpu_s_per_gb", "p50_s", "p99_s",
}  # fmt: skip
MORE_ROW_KEYS = {
    "checksum_cpu_s_per_gb",
    "first_job_s", "memcpy_gbps", "raw_queue_depth", "raw_gbps_by_depth", "raw_cpu_s_per_gb",
    "file_per_chunk_cpu_s_per_gb", "write_amplification", "drive_bytes_per_byte", "cold",
    "direct", "tier_direct", "num_jobs", "bytes", "rounds", "gbps_by_round",
}  # fmt: skip


# The command


def test_the_command_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "storage", "--path", str(tmp_path), *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert set(report) == {
        "rows", "promises", "notes", "huge_pages_share", "small_pages", "configuration",
    }  # fmt: skip
    assert 0 <= report["huge_pages_share"] <= 1
    assert [row["op"] for row in report["rows"]] == [FIRST_FILL, WRITE, READ]
    for row in report["rows"]:
        assert set(row) == ROW_KEYS | MORE_ROW_KEYS
        assert (row["chunk_bytes"], row["jobs"], row["num_jobs"]) == (MIB, 4, 4)
        assert row["bytes"] == 32 * MIB
        assert row["rounds"] == (1 if row["op"] == FIRST_FILL else 2)
        assert row["ratio"] == row["tier_gbps"] / row["raw_gbps"]
        for name in (TIER, RAW, FILE_PER_CHUNK):
            assert row[f"{name}_gbps"] == median(row["gbps_by_round"][name])
            assert len(row["gbps_by_round"][name]) == row["rounds"]
        assert 0 < row["p50_s"] <= row["p99_s"]
        assert min(row["cpu_s_per_gb"], row["raw_cpu_s_per_gb"], row["memcpy_gbps"]) > 0
        by_depth = {int(key): value for key, value in row["raw_gbps_by_depth"].items()}
        assert set(by_depth) == {1, 2, 4, 8, 16}
        assert by_depth[row["raw_queue_depth"]] == max(by_depth.values())
        if (
            row["direct"]
            and row["tier_direct"]
            and None not in row["drive_bytes_per_byte"].values()
        ):
            check_drive_bytes(row)
    assert len({row["tier_gbps"] for row in report["rows"]}) == 3
    assert len(report["promises"]) == 5
    assert {each["met"] for each in report["promises"]} <= {True, False, None}
    assert report["configuration"]["chunks"][0]["tier_capacity_bytes"] == 32 * (
        record_bytes(MIB) + 512
    )
    assert list(tmp_path.iterdir()) == []


def check_drive_bytes(row: dict[str, object]) -> None:
    """With O_DIRECT the kernel counts every byte as it is asked for (not where that is memory)."""
    shares = row["drive_bytes_per_byte"]
    assert isinstance(shares, dict)
    if machine.file_system(Path("/tmp"))[0] != "tmpfs":
        assert shares[RAW] == pytest.approx(1, abs=0.01)
        assert shares[FILE_PER_CHUNK] == pytest.approx(1, abs=0.01)
        assert 1 <= shares[TIER] < 1.1
    assert row["cold"] is (None if row["op"] != READ else min(shares.values()) >= 0.99)
    assert row["write_amplification"] == (None if row["op"] == READ else shares[TIER])


def test_the_command_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --path it is the current directory; several chunk sizes."""
    monkeypatch.chdir(tmp_path)
    arguments = ["--size", "17MiB", "--chunk", "1MiB", "--chunk", "8MiB", "--jobs", "2"]
    assert cli.main(["bench", "storage", *arguments, "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    configuration, table, legend, *_, verdicts = out.strip().split("\n\n")
    assert configuration.startswith("Stepwell ")
    assert str(tmp_path) in configuration
    assert "2 jobs in flight, 8 tier threads; first fill and 1 round, raw file" in configuration
    assert "chunks of 1.0 MiB: 16 a round, 16.0 MiB, 8 in a job" in configuration
    assert "chunks of 8.0 MiB: 2 a round, 16.0 MiB, 1 in a job" in configuration
    assert "% of the buffers in huge pages" in configuration
    assert [line[:10].strip() for line in table.splitlines()[2:]] == [
        "first fill", "write", "cold read",
    ] * 2  # fmt: skip
    assert legend.startswith("tier, raw, files")
    lines = verdicts.splitlines()
    assert len(lines) == 5
    assert all(line.split("  ")[0] in ("met", "NOT MET", "not measured") for line in lines)
    assert max(map(len, out.splitlines())) < 130
    assert list(tmp_path.iterdir()) == []


def test_small_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "storage", "--path", str(tmp_path), *SMALL, "--small-pages"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "\n0% of the buffers in huge pages, as asked for\n" in out
    assert "SMALL PAGES" not in out


def test_jobs_in_flight_are_never_more_and_every_chunk_moves_once(
    tmp_path: Path, watched: list["WatchedTier"]
) -> None:
    options = StorageOptions(
        (str(tmp_path),), ("1MiB",), jobs=3, chunks_per_job=2, size="17MiB", rounds=2
    )
    result = run_storage(options)
    (tier,) = watched
    assert tier.most_in_flight == 3
    assert [row.num_jobs for row in result.rows] == [8, 8, 8]
    keys: dict[Direction, list[Key]] = {Direction.WRITE: [], Direction.READ: []}
    for job in tier.jobs:
        assert len(job.chunks) == 2
        keys[job.direction] += [chunk.key for chunk in job.chunks]
        assert all(chunk.buffer.nbytes == MIB for chunk in job.chunks)
    assert keys[Direction.WRITE] == keys[Direction.READ]
    assert len(set(keys[Direction.WRITE])) == 3 * 16


def test_the_tier_has_room_for_one_round_so_writes_evict(
    tmp_path: Path, watched: list["WatchedTier"]
) -> None:
    run_storage(StorageOptions((str(tmp_path),), ("1MiB",), jobs=4, size="16MiB", rounds=2))
    (tier,) = watched
    assert tier.at_close.count(Lookup.HIT) == 16
    assert tier.at_close == [Lookup.MISS] * 32 + [Lookup.HIT] * 16


def test_the_first_job_is_the_first_that_was_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap_tier(monkeypatch, SlowlyReportingTier)
    result = run_storage(StorageOptions((str(tmp_path),), ("1MiB",), jobs=4, size="4MiB", rounds=1))
    for row in result.rows:
        assert 0.02 <= row.first_job_s < row.latency_s(50) - 0.01
        assert row.latency_s(0) <= row.first_job_s
        assert row.latency_s(99) >= 0.06


def test_contenders_take_turns_and_the_order_rotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []

    class Recorder(Progress):
        def phase(self, name: str) -> None:
            phases.append(name)

    monkeypatch.setattr(storage, "Progress", Recorder)
    run_storage(StorageOptions((str(tmp_path),), ("1MiB",), jobs=2, size="4MiB", rounds=3))
    moves = [name.split(": ")[1] for name in phases if ": " in name]
    names = [RAW, TIER, FILE_PER_CHUNK]
    expected = []
    for idx in range(4):
        order = names[idx % 3 :] + names[: idx % 3]
        expected += [f"{name} {op}" for op in ("write", "read") for name in order]
    assert moves == expected


# When something goes wrong


class WatchedTier:
    """A real tier, and a record of what was asked of it."""

    def __init__(self, inner: StorageTier) -> None:
        self.inner = inner
        self.jobs: list[Job] = []
        self.most_in_flight = 0
        self.at_close: list[Lookup] = []
        self._in_flight = 0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def direct(self) -> bool:
        return self.inner.direct

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        return self.inner.contains(keys)

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self.inner.submit(job)

    def poll(self) -> list[JobResult]:
        finished = self.inner.poll()
        self._in_flight -= len(finished)
        return finished

    def delete(self, keys: Sequence[Key]) -> int:
        return self.inner.delete(keys)

    def drain(self, timeout_s: float) -> bool:
        return self.inner.drain(timeout_s)

    def close(self) -> None:
        written = [job for job in self.jobs if job.direction is Direction.WRITE]
        keys = [chunk.key for job in written for chunk in job.chunks]
        self.at_close = self.inner.contains(keys)
        self.inner.close()


class SlowlyReportingTier(WatchedTier):
    """Reports one job at a time, 20 ms apart."""

    def __init__(self, inner: StorageTier) -> None:
        super().__init__(inner)
        self._finished: list[JobResult] = []

    def poll(self) -> list[JobResult]:
        time.sleep(0.02)
        self._finished += super().poll()
        reported, self._finished = self._finished[:1], self._finished[1:]
        return reported


class LyingTier(WatchedTier):
    """Says DONE of reads and has read nothing."""

    def submit(self, job: Job) -> None:
        if job.direction is Direction.READ:
            self.jobs.append(job)
        else:
            super().submit(job)

    def poll(self) -> list[JobResult]:
        reads = [job for job in self.jobs if job.direction is Direction.READ]
        self.jobs = [job for job in self.jobs if job.direction is not Direction.READ]
        done = ChunkResult(Outcome.DONE)
        return super().poll() + [
            JobResult(job.job_id, job.direction, (done,) * len(job.chunks), 0, 0.0) for job in reads
        ]


class AnsweringTier(WatchedTier):
    """One chunk of every write has another result."""

    result = ChunkResult(Outcome.DONE)

    def poll(self) -> list[JobResult]:
        return [
            JobResult(each.job_id, each.direction, (*each.results[1:], self.result), 0, 0.0)
            for each in super().poll()
        ]


class RefusingTier(AnsweringTier):
    result = ChunkResult(Outcome.FULL, Reason.CAPACITY)


class KnowingTier(AnsweringTier):
    result = ChunkResult(Outcome.DONE, Reason.EXISTS)


def wrap_tier(
    monkeypatch: pytest.MonkeyPatch, wrapper: Callable[[StorageTier], WatchedTier]
) -> list[WatchedTier]:
    made: list[WatchedTier] = []
    really_open = storage.open_tier

    def open_tier(paths: Sequence[Path], capacity_bytes: int, num_threads: int) -> WatchedTier:
        made.append(wrapper(really_open(paths, capacity_bytes, num_threads)))
        return made[-1]

    monkeypatch.setattr(storage, "open_tier", open_tier)
    return made


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[WatchedTier]:
    """The tiers that were opened."""
    return wrap_tier(monkeypatch, WatchedTier)


@pytest.mark.parametrize(("tier", "error", "message"), [
    (RefusingTier, TierError, "did not write a chunk.*outcome=full reason=capacity"),
    (KnowingTier, TierError, "did not write a chunk.*outcome=done reason=exists"),
    (LyingTier, DataError, "not what was written: read=tier generation=0 chunk=0"),
])  # fmt: skip
def test_a_tier_that_does_not_do_it_is_no_measurement_and_leaves_nothing(
    tier: type[WatchedTier],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrap_tier(monkeypatch, tier)
    with pytest.raises(error, match=message):
        run_storage(StorageOptions((str(tmp_path),), ("1MiB",), jobs=2, size="4MiB", rounds=1))
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["bench", "storage", "--path", str(tmp_path), *SMALL]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stepwell: error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("contender", [RawFile, FilePerChunk])
def test_a_drive_that_fails_leaves_nothing(
    contender: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, generation: int) -> Section:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(contender, "read", broken)
    before = set(threading.enumerate())
    assert cli.main(["bench", "storage", "--path", str(tmp_path), *SMALL]) == 2
    assert list(tmp_path.iterdir()) == []
    left = set(threading.enumerate()) - before
    assert [each for each in left if each.name.startswith("stepwell")] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("when", ["sweep", "tier"])
def test_an_interrupt_leaves_nothing(
    number: signal.Signals, status: int, when: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "stepwell", "bench", "storage", "--path", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--size", "64MiB", "--chunk", "1MiB", "--rounds", "10000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        give_up_s = time.monotonic() + 60
        while not list(tmp_path.glob(f"stepwell-bench-*/{when}")):
            assert time.monotonic() < give_up_s
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    said = f"stepwell: interrupted; nothing is left in {tmp_path}\n".encode()
    assert (process.returncode, out) == (status, b"")
    assert err == (said if number == signal.SIGINT else b"")
    assert list(tmp_path.iterdir()) == []


# Bad input


BAD_OPTIONS = {
    "a file": (StorageOptions(("{tmp}/file",)), "is no directory"),
    "a path twice": (StorageOptions(("{tmp}", "{tmp}/other", "{tmp}/x/..")), "is given twice"),
    "a path twice, by a link": (StorageOptions(("{tmp}/other", "{tmp}/link")), "is given twice"),
    "two paths in one": (StorageOptions(("{tmp},{tmp}/other",)), "does not exist"),
    "no room": (StorageOptions(("{tmp}",), size="1000TiB"), "not enough room"),
    "size, chunks per job": (
        StorageOptions(("{tmp}",), ("1MiB",), jobs=2, chunks_per_job=3, size="5MiB"),
        "size is at least jobs x chunks-per-job x chunk, 6.0 MiB",
    ),
    "the second chunk": (
        StorageOptions(("{tmp}",), ("1MiB", "4MiB"), jobs=2, size="7MiB"),
        "size is at least jobs x chunk, 8.0 MiB",
    ),
    "chunks per job": (StorageOptions(("{tmp}",), chunks_per_job=0), "must be at least 1"),
    "threads": (StorageOptions(("{tmp}",), threads=257), "1 to 256"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    options, message = BAD_OPTIONS[case]
    paths = tuple(path.replace("{tmp}", str(tmp_path)) for path in options.paths)
    changed = {name: getattr(options, name) for name in options.__slots__} | {"paths": paths}
    with pytest.raises(ConfigError, match=message):
        check_options(StorageOptions(**changed))


def test_room_for_three_times_the_size_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = StorageOptions((str(tmp_path),), ("1MiB",), jobs=4, size="100MiB")
    really = os.statvfs(tmp_path)
    # f_bsize, f_frsize, f_blocks, f_bfree, f_bavail, ...: the last one counts, in f_frsize.
    for free_mib, enough in ((299, False), (400, True)):
        fields = list(really)
        fields[1], fields[3], fields[4] = MIB, 10_000, free_mib
        monkeypatch.setattr(os, "statvfs", lambda path, f=tuple(fields): os.statvfs_result(f))
        if enough:
            check_options(options)
        else:
            with pytest.raises(ConfigError, match=r"not enough room.*free=299.0 MiB"):
                check_options(options)


def test_memory_for_the_buffers_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = StorageOptions((str(tmp_path),), ("1MiB",), jobs=4, size="100MiB")
    monkeypatch.setattr(machine, "memory_available", lambda: 112 * MIB)
    check_options(options)
    monkeypatch.setattr(machine, "memory_available", lambda: 110 * MIB)
    with pytest.raises(ConfigError, match="not enough memory"):
        check_options(options)


# The ceilings


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for folder in made:
        folder.mkdir()
    return made


def check_section(section: Section, payload_bytes: int, direct: bool) -> None:
    assert section.payload_bytes == payload_bytes
    assert section.wall_s > 0
    assert section.cpu_s >= 0
    if direct and section.drive_bytes and machine.file_system(Path("/tmp"))[0] != "tmpfs":
        # Blocks of the directory may be among it.
        assert payload_bytes <= section.drive_bytes < payload_bytes + 16 * 4096


def test_the_raw_file_moves_every_byte(folders: list[Path]) -> None:
    payloads = Payloads(5, 64 << 10)
    payloads.fill(3)
    direct = direct_works(folders[0])
    with RawFile(folders, payloads, direct=direct) as raw:
        sizes = [(folder / "raw").stat() for folder in folders]
        assert [each.st_size for each in sizes] == [3 * (64 << 10)] * 2
        assert all(each.st_blocks * 512 >= each.st_size for each in sizes)
        check_section(raw.write(0), payloads.num_bytes, direct)
        a, b = ((folder / "raw").read_bytes() for folder in folders)
        chunks = [bytes(payloads.chunk(idx)) for idx in range(5)]
        assert a == chunks[0] + chunks[2] + chunks[4]
        assert b == chunks[1] + chunks[3] + bytes(64 << 10)
        payloads.wipe()
        check_section(raw.read(0), payloads.num_bytes, direct)
        payloads.check(3, "raw")
        assert [bytes(payloads.chunk(idx)) for idx in range(5)] == chunks
    with pytest.raises(FileExistsError):
        RawFile(folders, payloads, direct=direct)


def test_a_part_of_the_raw_file(folders: list[Path]) -> None:
    payloads = Payloads(5, 4096)
    payloads.fill(0)
    with RawFile(folders[:1], payloads, direct=False, num_chunks=2) as raw:
        assert raw.write(0).payload_bytes == 8192
    assert (folders[0] / "raw").read_bytes() == bytes(payloads.chunk(0)) + bytes(payloads.chunk(1))


def test_a_file_per_chunk_moves_every_byte(folders: list[Path]) -> None:
    payloads = Payloads(5, 64 << 10)
    direct = direct_works(folders[0])
    files = FilePerChunk(folders, payloads, direct=direct)
    for generation in range(2):
        payloads.fill(generation)
        chunks = {bytes(payloads.chunk(idx)) for idx in range(5)}
        files.prepare()
        assert [path for folder in folders for path in folder.iterdir()] == []
        check_section(files.write(generation), payloads.num_bytes, direct)
        assert [len(list(folder.iterdir())) for folder in folders] == [3, 2]
        assert {path.read_bytes() for folder in folders for path in folder.iterdir()} == chunks
        payloads.wipe()
        check_section(files.read(generation), payloads.num_bytes, direct)
        payloads.check(generation, "files")
    with pytest.raises(FileNotFoundError):
        files.read(0)


def test_a_file_per_chunk_is_written_under_another_name(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []
    really = os.replace

    def replace(source: str, target: str) -> None:
        renamed.append((source, target, os.path.getsize(source)))
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    payloads = Payloads(3, 4096)
    FilePerChunk(folders[:1], payloads, direct=False).write(0)
    assert {each[1:] for each in renamed} == {(str(path), 4096) for path in folders[0].iterdir()}
    assert all(source == f"{target}.tmp" for source, target, _ in renamed)


def test_short_transfers_are_gone_on_with(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pwritev", "preadv"):
        really = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda fd, buffers, at, really=really: really(fd, [buffers[0][:4096]], at)
        )
    payloads = Payloads(2, 3 * 4096)
    payloads.fill(0)
    with RawFile(folders[:1], payloads, direct=direct_works(folders[0])) as raw:
        raw.write(0)
        payloads.wipe()
        raw.read(0)
    payloads.check(0, "raw")
    os.truncate(folders[0] / "raw", 4096)
    monkeypatch.undo()
    fd = os.open(folders[0] / "raw", os.O_RDONLY)
    with pytest.raises(OSError, match="ends too soon"):
        rawio._read_all(fd, payloads.chunk(0), 0)
    os.close(fd)


def test_the_memory_copy_copies_half_over_the_other() -> None:
    payloads = Payloads(5, 4 * MIB)
    payloads.fill(0)
    first = b"".join(bytes(payloads.chunk(idx)) for idx in range(5))[: 10 * MIB]
    section = copy_memory(payloads, 2)
    assert section.payload_bytes == 10 * MIB
    assert b"".join(bytes(payloads.chunk(idx)) for idx in range(5)) == first + first


def test_run_parallel_runs_each_task_once_and_so_many_at_once() -> None:
    together = threading.Barrier(4)
    seen: list[int] = []

    def task(idx: int) -> None:
        together.wait(30)  # broken unless four run at the same time
        seen.append(idx)

    section = run_parallel(Direction.WRITE, 4, 12, task, 123)
    assert sorted(seen) == list(range(12))
    assert section.payload_bytes == 123


def test_run_parallel_stops_at_an_error() -> None:
    seen: list[int] = []
    before = set(threading.enumerate())

    def task(idx: int) -> None:
        seen.append(idx)
        if idx == 2:
            raise OSError("a drive died")

    with pytest.raises(OSError, match="a drive died"):
        run_parallel(Direction.WRITE, 1, 1000, task, 0)
    assert seen == [0, 1, 2]
    assert set(threading.enumerate()) <= before


# The bytes


def test_payloads_are_incompressible_and_no_two_pages_are_equal() -> None:
    payloads = Payloads(4, 64 << 10)
    pages = set()
    for generation in range(3):
        payloads.fill(generation)
        data = b"".join(bytes(payloads.chunk(idx)) for idx in range(4))
        assert len(zlib.compress(data)) > len(data)
        pages |= {data[at : at + 4096] for at in range(0, len(data), 4096)}
    assert len(pages) == 3 * 4 * 16


def test_payloads_notice_what_is_not_theirs() -> None:
    payloads = Payloads(3, 256 << 10)
    payloads.fill(7)
    payloads.check(7, "x")
    with pytest.raises(DataError, match="read=x generation=6 chunk=0"):
        payloads.check(6, "x")
    payloads.chunk(2)[-1] ^= 1
    with pytest.raises(DataError, match="generation=7 chunk=2"):
        payloads.check(7, "x")
    payloads.check(7, "x", chunks=[0, 1])
    payloads.fill(7)
    payloads.chunk(0)[:] = payloads.chunk(1)
    with pytest.raises(DataError, match="chunk=0"):
        payloads.check(7, "x")
    payloads.fill(7)
    payloads.wipe()
    for idx in range(3):
        with pytest.raises(DataError, match=f"chunk={idx}"):
            payloads.check(7, "x", chunks=[idx])
    with pytest.raises(ValueError, match="no buffers"):
        Payloads(1, 4097)


# The arithmetic


def a_section(
    gbps: float, cpu_s: float = 0.1, drive: int | None = 10**9, latencies: Sequence[float] = ()
) -> Section:
    """1e9 bytes at a given speed."""
    first = min(latencies) if latencies else None
    return Section(10**9, 1 / gbps, cpu_s, drive, tuple(latencies), first)


def a_row(
    op: str, tier: float, raw: float, files: float, *, chunk_bytes: int = 8 * MIB, cpu: float = 0.1,
    drive: int | None = 10**9,
) -> Row:  # fmt: skip
    sections = {
        TIER: a_section(tier, cpu, drive, (0.5, 1.5)),
        RAW: a_section(raw, 0.05, drive),
        FILE_PER_CHUNK: a_section(files, 0.2, drive),
        MEMORY_COPY: a_section(10),
        CHECKSUM: a_section(40),
    }
    return make_row(
        op, [sections], chunk_bytes=chunk_bytes, jobs=2, raw_queue_depth=4, raw_gbps_by_depth={4: 5}
    )


def a_result(
    *rows: Row,
    direct: bool = True,
    tier_direct: bool = True,
    huge_share: float = 1.0,
    small_pages: bool = False,
) -> StorageResult:
    return StorageResult(rows, {}, direct, tier_direct, huge_share, small_pages)


def test_a_row_of_three_rounds() -> None:
    rounds = [
        {
            TIER: a_section(tier, cpu, 1_100_000_000, latencies),
            RAW: a_section(raw, 0.05),
            FILE_PER_CHUNK: a_section(1.0, 0.4, None),
            MEMORY_COPY: a_section(20),
            CHECKSUM: a_section(40),
        }
        for tier, raw, cpu, latencies in (
            (3.0, 4.0, 0.1, (1.0, 2.0)), (2.0, 4.0, 0.3, (3.0, 4.0)), (1.0, 5.0, 0.2, (0.5, 6.0)),
        )
    ]  # fmt: skip
    row = make_row(
        WRITE, rounds, chunk_bytes=MIB, jobs=2, raw_queue_depth=8, raw_gbps_by_depth={1: 3, 8: 4}
    )
    values = storage_json(a_result(row))["rows"]
    assert isinstance(values, list)
    latencies = [0.5, 1, 2, 3, 4, 6]
    assert values[0] == {
        "op": WRITE, "chunk_bytes": MIB, "jobs": 2, "num_jobs": 2, "bytes": 10**9, "rounds": 3,
        "tier_gbps": pytest.approx(2.0), "raw_gbps": pytest.approx(4.0),
        "ratio": pytest.approx(0.5), "file_per_chunk_gbps": pytest.approx(1.0),
        "memcpy_gbps": pytest.approx(20), "cpu_s_per_gb": pytest.approx(0.2),
        "checksum_cpu_s_per_gb": pytest.approx(0.1),
        "raw_cpu_s_per_gb": pytest.approx(0.05), "file_per_chunk_cpu_s_per_gb": pytest.approx(0.4),
        "p50_s": pytest.approx(2.5), "p99_s": pytest.approx(percentile(latencies, 99)),
        "first_job_s": 1.0, "raw_queue_depth": 8, "raw_gbps_by_depth": {"1": 3, "8": 4},
        "write_amplification": pytest.approx(1.1), "cold": None, "direct": True,
        "tier_direct": True,
        "drive_bytes_per_byte": {TIER: pytest.approx(1.1), RAW: 1.0, FILE_PER_CHUNK: None},
        "gbps_by_round": {
            TIER: pytest.approx([3, 2, 1]), RAW: pytest.approx([4, 4, 5]),
            FILE_PER_CHUNK: pytest.approx([1, 1, 1]),
        },
    }  # fmt: skip
    json.dumps(values)


def test_a_section_counts_in_units_of_1e9_bytes() -> None:
    section = Section(2 * 10**9, 4.0, 1.0, None)
    assert section.gbps == 0.5
    assert section.cpu_s_per_gb == 0.5


@pytest.mark.parametrize(("rows", "met"), [
    ([a_row(WRITE, 3.5, 4, 3), a_row(READ, 3.7, 4, 3)], [True] * 5),
    ([a_row(WRITE, 3.3, 4, 3), a_row(READ, 3.7, 4, 3)], [True, False, True, True, True]),
    ([a_row(WRITE, 3.5, 4, 3), a_row(READ, 3.5, 4, 3)], [False, True, True, True, True]),
    ([a_row(WRITE, 3.5, 4, 3.6), a_row(READ, 3.7, 4, 3.8)], [True, True, False, True, True]),
    ([a_row(WRITE, 3.5, 4, 3, cpu=0.14), a_row(READ, 3.7, 4, 3, cpu=0.13)],
     [True, True, True, False, True]),
    ([a_row(WRITE, 3.5, 4, 3, cpu=0.16), a_row(READ, 3.7, 4, 3, cpu=0.12)],
     [True, True, True, True, False]),
    # One chunk size that falls short is enough; CPU time is promised at 8 MiB alone.
    ([a_row(WRITE, 3.5, 4, 3), a_row(READ, 3.7, 4, 3),
      a_row(WRITE, 1, 4, 3, chunk_bytes=MIB, cpu=9),
      a_row(READ, 3.7, 4, 3, chunk_bytes=MIB, cpu=9)],
     [True, False, False, True, True]),
    ([a_row(WRITE, 3.5, 4, 3, chunk_bytes=MIB), a_row(READ, 3.7, 4, 3, chunk_bytes=MIB)],
     [True, True, True, None, None]),
    # The first fill is reported, and promised nothing of.
    ([a_row(FIRST_FILL, 1, 4, 3), a_row(WRITE, 3.5, 4, 3), a_row(READ, 3.7, 4, 3)], [True] * 5),
    # What came from memory was no cold read.
    ([a_row(WRITE, 3.5, 4, 3), a_row(READ, 3.7, 4, 3, drive=5 * 10**8)],
     [None, True, True, True, True]),
    ([a_row(WRITE, 3.5, 4, 3), a_row(READ, 3.7, 4, 3, drive=None)], [True] * 5),
])  # fmt: skip
def test_promises(rows: list[Row], met: list[bool | None]) -> None:
    assert [each.met for each in promises(rows)] == met


def test_promises_say_their_figures() -> None:
    rows = [a_row(WRITE, 3.3, 4, 3), a_row(READ, 3.7, 4, 3), a_row(READ, 1, 4, 3, chunk_bytes=MIB)]
    read, write, files, cpu_read, _ = promises(rows)
    assert read.words == "cold read >= 0.90 of raw"
    assert read.detail == "8.0 MiB: 0.93 (3.70 of 4.00 GB/s); 1.0 MiB: 0.25 (1.00 of 4.00 GB/s)"
    assert write.detail == "8.0 MiB: 0.82 (3.30 of 4.00 GB/s)"
    assert files.detail == "8.0 MiB: 3.30 to 3.00 GB/s"
    assert cpu_read.detail == "0.100 s/GB, of which raw file 0.050 and checksum 0.100"


def test_two_drives_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Raw file, tier and files lie on both, and the tier's chunks are where they should be."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    command = ["bench", "storage", "--size", "8MiB", "--chunk", "1MiB", "--jobs", "2", "--json"]
    for path in paths:
        command += ["--path", str(path)]
    assert cli.main([*command, "--rounds", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["path"] for each in report["configuration"]["paths"]] == list(map(str, paths))
    assert [row["op"] for row in report["rows"]] == [FIRST_FILL, WRITE, READ]
    assert [list(path.iterdir()) for path in paths] == [[], []]


@pytest.mark.parametrize(("result", "expected"), [
    (a_result(a_row(READ, 3, 4, 3)), []),
    (a_result(a_row(READ, 3, 4, 3), direct=False, tier_direct=False),
     ["WITHOUT O_DIRECT for any of the three"]),
    (a_result(a_row(READ, 3, 4, 3), tier_direct=False), ["WITHOUT O_DIRECT for the tier"]),
    (a_result(a_row(READ, 3, 4, 3, drive=0)), ["NOT COLD at 8.0 MiB"]),
    (a_result(a_row(WRITE, 3, 4, 3, drive=0)), []),
    (a_result(a_row(WRITE, 3, 4, 3), huge_share=0.9), []),
    (a_result(a_row(WRITE, 3, 4, 3), huge_share=0.89), ["SMALL PAGES: 89% of the buffers"]),
    (a_result(a_row(WRITE, 3, 4, 3), huge_share=0.0, small_pages=True), []),
])  # fmt: skip
def test_notes(result: StorageResult, expected: list[str]) -> None:
    found = notes(result)
    assert [note[: len(start)] for note, start in zip(found, expected, strict=True)] == expected


def test_rounds_that_differ_are_called_noisy() -> None:
    def row(*raw: float) -> Row:
        rounds = [
            {TIER: a_section(3, latencies=[1]), RAW: a_section(each), FILE_PER_CHUNK: a_section(3)}
            for each in raw
        ]
        return make_row(
            WRITE, rounds, chunk_bytes=MIB, jobs=1, raw_queue_depth=1, raw_gbps_by_depth={}
        )

    assert not notes(a_result(row(4.0, 4.4, 3.6)))
    (note,) = notes(a_result(row(4.0, 4.4, 3.2)))
    assert note.startswith("NOISY")
    assert "write at 1.0 MiB" in note


# Without O_DIRECT


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system that refuses O_DIRECT, as seen by the plain files."""
    really = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        return really(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("no_direct")
def test_without_o_direct_reads_are_still_cold_and_it_is_said(tmp_path: Path) -> None:
    result = run_storage(
        StorageOptions((str(tmp_path),), ("1MiB",), jobs=2, size="16MiB", rounds=1)
    )
    assert not result.direct
    assert not result.tier_direct
    assert "WITHOUT O_DIRECT for any of the three" in storage_text(result)
    read = result.rows[-1]
    if machine.file_system(tmp_path)[0] != "tmpfs" and read.cold is not None:
        assert read.cold
    assert list(tmp_path.iterdir()) == []
