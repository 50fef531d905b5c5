"""`stepwell bench index`: a store of very many small chunks: its memory, lookups and restarts."""

import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.bench import machine
from stepwell.bench.procs import io_counters
from stepwell.bench.progress import Progress
from stepwell.bench.workplace import check_folder, signals_as_exceptions, working_folders
from stepwell.core.keys import Key, Root, make_key
from stepwell.core.memory import aligned_memory
from stepwell.core.types import Chunk, Direction, Job
from stepwell.errors import ConfigError, TierError
from stepwell.settings import format_bytes, parse_path, parse_size
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier, slot_cost_bytes

__all__ = ["IndexOptions", "IndexResult", "Restart", "probe", "run_index"]

_ROOT = Root(bytes(range(32)))
_JOB_CHUNKS = 256
_JOBS_IN_FLIGHT = 16
_LOOKUP_KEYS = 2048
_LOOKUP_ROUNDS = 50
_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """What to measure.

    Attributes:
        path: existing absolute directory; a new folder is made in it and removed at the end.
            Empty for the current directory.
        num_chunks: in the store.
        chunk: size of each, a text such as "4KiB".
        scan: also lose the journal and start from the headers.
    """

    path: str = ""
    num_chunks: int = 100_000
    chunk: str = "4KiB"
    scan: bool = True


@dataclass(frozen=True, slots=True)
class Restart:
    """What a fresh process found.

    Attributes:
        open_s: opening the store.
        first_hit_s: opening it, looking a chunk up and reading it back.
        memory_bytes: growth of the process's resident memory by opening it.
        keys_per_s: looked up, 2,048 a call, half of them there; median of 50 calls.
        lookup_syscalls: read system calls of the process during those lookups.
    """

    open_s: float
    first_hit_s: float
    memory_bytes: int
    keys_per_s: float
    lookup_syscalls: int


@dataclass(frozen=True, slots=True)
class IndexResult:
    """What was found.

    Attributes:
        num_chunks, chunk_bytes: as asked for.
        write_s: how long writing all of them took.
        journal_bytes: its size at the end.
        journal: restart from the journal.
        scan: restart without one, from the headers; None if not measured.
        configuration: the machine and the drive; JSON values.
    """

    num_chunks: int
    chunk_bytes: int
    write_s: float
    journal_bytes: int
    journal: Restart
    scan: Restart | None
    configuration: dict[str, object]

    @property
    def index_bytes_per_chunk(self) -> float:
        """Of resident memory, the tier's threads and the journal's image included."""
        return self.journal.memory_bytes / self.num_chunks


def run_index(options: IndexOptions) -> IndexResult:
    """Measure; blocks for as long as writing all the chunks takes, and some.

    Raises:
        ConfigError: a value is out of range, or there is no room.
        TierError: a chunk could not be written or read.
    """
    parent, chunk_bytes = _check(options)
    num_jobs = -(-options.num_chunks // _JOB_CHUNKS)
    with (
        signals_as_exceptions(),
        Progress(num_jobs + 1 + options.scan) as progress,
        working_folders([parent]) as (folder,),
    ):
        store = folder / "kv"
        progress.phase("writing")
        write_s = _fill(store, options.num_chunks, chunk_bytes, progress)
        progress.phase("restart from the journal")
        journal_bytes = (store / "journal").stat().st_size
        journal = _in_fresh_process(store, options.num_chunks, chunk_bytes)
        progress.step()
        scan = None
        if options.scan:
            progress.phase("restart from the headers")
            (store / "journal").unlink()
            scan = _in_fresh_process(store, options.num_chunks, chunk_bytes)
            progress.step()
    configuration = {**machine.storage_machine(), "path": machine.path_configuration(parent)}
    return IndexResult(
        options.num_chunks, chunk_bytes, write_s, journal_bytes, journal, scan, configuration
    )


def probe(store: str, num_chunks: int, chunk_bytes: int) -> None:
    """What the fresh process does: open, find, read, look up; writes a `Restart` as JSON."""
    # What the first tier of a process costs, however small it is, is not the index's.
    _open(Path(store).with_name("empty"), 1, chunk_bytes).close()
    gc.collect()
    before_bytes = _resident_bytes()
    began_s = time.perf_counter()
    tier = _open(Path(store), num_chunks, chunk_bytes)
    open_s = time.perf_counter() - began_s
    try:
        buffer = aligned_memory(chunk_bytes)
        _run(tier, [Job(0, Direction.READ, [Chunk(_key(num_chunks // 2), buffer)], _WAIT_S)])
        first_hit_s = time.perf_counter() - began_s
        gc.collect()
        memory_bytes = _resident_bytes() - before_bytes
        present = [_key(idx) for idx in range(_LOOKUP_KEYS // 2)]
        absent = [_key(num_chunks + idx) for idx in range(_LOOKUP_KEYS // 2)]
        keys = [key for pair in zip(present, absent, strict=True) for key in pair]
        own = io_counters().get("syscr", 0)
        syscalls = io_counters().get("syscr", 0)
        own = syscalls - own  # of reading the counters
        rates = []
        for _ in range(_LOOKUP_ROUNDS):
            call_s = time.perf_counter()
            tier.contains(keys)
            rates.append(_LOOKUP_KEYS / (time.perf_counter() - call_s))
        syscalls = io_counters().get("syscr", 0) - syscalls - own
    finally:
        tier.close()
    found = [open_s, first_hit_s, memory_bytes, statistics.median(rates), max(0, syscalls)]
    sys.stdout.write(json.dumps(found))


def _check(options: IndexOptions) -> tuple[Path, int]:
    parent = parse_path(options.path) if options.path else Path.cwd()
    check_folder(parent)
    chunk_bytes = parse_size(options.chunk, "chunk", unit="KiB")
    if not 1 <= options.num_chunks <= 100_000_000:
        raise ConfigError(f"chunks is 1 to 100000000: chunks={options.num_chunks}")
    if not 1 <= chunk_bytes <= 1 << 30:
        raise ConfigError(f"chunk is at most 1GiB, and above zero: chunk={options.chunk}")
    needed_bytes = options.num_chunks * slot_cost_bytes(chunk_bytes)
    free: Any = machine.path_configuration(parent)["free_bytes"]
    if needed_bytes > free:
        raise ConfigError(
            f"there is no room for so many chunks: path={parent} "
            f"needed={format_bytes(needed_bytes)} free={format_bytes(free)}"
        )
    return parent, chunk_bytes


def _open(store: Path, num_chunks: int, chunk_bytes: int) -> DiskTier:
    # Room for the last extents, which are whole jobs.
    capacity_bytes = (num_chunks + _JOB_CHUNKS) * slot_cost_bytes(chunk_bytes)
    return DiskTier(store, capacity_bytes, TierContext())


def _fill(store: Path, num_chunks: int, chunk_bytes: int, progress: Progress) -> float:
    payload = aligned_memory(chunk_bytes)
    began_s = time.perf_counter()
    tier = _open(store, num_chunks, chunk_bytes)
    try:
        jobs = []
        for begin in range(0, num_chunks, _JOB_CHUNKS):
            idxs = range(begin, min(begin + _JOB_CHUNKS, num_chunks))
            chunks = [Chunk(_key(idx), payload) for idx in idxs]
            jobs.append(Job(begin, Direction.WRITE, chunks, _WAIT_S))
            if len(jobs) == _JOBS_IN_FLIGHT:
                _run(tier, jobs, progress)
                jobs = []
        _run(tier, jobs, progress)
    finally:
        tier.close()
    return time.perf_counter() - began_s


def _run(tier: DiskTier, jobs: list[Job], progress: Progress | None = None) -> None:
    for job in jobs:
        tier.submit(job)
    left = len(jobs)
    give_up_s = time.monotonic() + _WAIT_S
    while left:
        for result in tier.poll():
            if not result.done:
                wrong = next(each for each in result.results if each.reason)
                raise TierError(
                    f"the tier did not {result.direction} a chunk: "
                    f"outcome={wrong.outcome} reason={wrong.reason}"
                )
            left -= 1
            if progress is not None:
                progress.step()
        if time.monotonic() > give_up_s:
            raise TierError(f"the tier does not answer: seconds={_WAIT_S}")
        time.sleep(0.0005)


def _in_fresh_process(store: Path, num_chunks: int, chunk_bytes: int) -> Restart:
    code = (
        "import sys; from stepwell.bench.index import probe; "
        "probe(sys.argv[1], *map(int, sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, str(store), str(num_chunks), str(chunk_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        raise TierError(f"the restarted process failed: {last[0]} status={ended.returncode}")
    return Restart(*json.loads(ended.stdout))


def _key(idx: int) -> Key:
    # As long as vLLM's: a 32-byte hash and a 4-byte group; spread like a hash.
    return make_key(_ROOT, (idx * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(36, "little"))


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
