"""NIXL as a medium, on files: the contract, and what becomes of transfers that fail or are late."""

import contextlib
import ctypes
import errno
import importlib.util
import os
import platform
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.testing import buffer_of, key_of, payload_of
from stepwell.tiers.media import nixl, pool
from stepwell.tiers.media.base import Medium, Record, Wanted
from stepwell.tiers.media.fs import FsMedium
from stepwell.tiers.media.kinds import open_medium
from stepwell.tiers.media.movers import Piece, TransferMover
from stepwell.tiers.media.nixl import FileTransfers, Plugin
from stepwell.tiers.media.records import ABSENT, TRUNCATED
from stepwell.tiers.media.transfer_engines import _LANES, TakenEngine, TransferEngines
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE

from . import test_fs
from .mounts import mount_memory, unmount
from .sites import NO_NIXL, FsSite

if importlib.util.find_spec("nixl_cu12") is None:
    pytest.skip(NO_NIXL, allow_module_level=True)

SIZE = 8192
LONG_S = 60.0
KEYS = [key_of(idx) for idx in range(6)]
URING = Plugin("POSIX", {"use_uring": "true"})


def medium_at(path: Path, scheme: str = "nixl+posix", **more: str) -> Medium:
    parameters = {"capacity": "64MiB", "min_free": "1MiB", **more}
    medium = open_medium(MediumUrl(scheme, path=str(path), parameters=parameters), LONG_S)
    medium.check()
    return medium


class NixlContract(test_fs.TestFs):
    __test__ = False
    api = ""

    def make_medium(self) -> FsMedium:
        self.place.mkdir(exist_ok=True)
        medium = medium_at(self.place / "pool", api=self.api)
        assert isinstance(medium, FsMedium)
        return medium


class TestUring(NixlContract):
    __test__ = True
    api = "uring"


class TestAio(NixlContract):
    __test__ = True
    api = "aio"


# Records.


def records_of(keys: list[Key], size: int = SIZE) -> list[Record]:
    return [
        Record(key, bytes([idx + 1]) * HEADER_BYTES, memoryview(payload_of(key, size)), 0.0)
        for idx, key in enumerate(keys)
    ]


def wanted_of(keys: list[Key], size: int = SIZE) -> list[Wanted]:
    return [Wanted(key, buffer_of(size)) for key in keys]


def check_read(found: list[Any], wanted: list[Wanted], idxs: list[int]) -> None:
    """Those and no others were served, each with its own bytes."""
    for idx, (page, each) in enumerate(zip(found, wanted, strict=True)):
        if idx in idxs:
            assert page == bytes([idx + 1]) * HEADER_BYTES
            assert bytes(each.payload) == payload_of(each.key, len(each.payload))
        else:
            assert isinstance(page, ChunkResult)


@pytest.mark.parametrize("api", ["uring", "aio"])
@pytest.mark.parametrize("size", [64, 8192, 12288 + 5, 3 << 20])
def test_what_one_wrote_the_other_reads(tmp_path: Path, api: str, size: int) -> None:
    """A pool is the same, whichever way its bytes take."""
    by_nixl, by_calls = medium_at(tmp_path / "pool", api=api), medium_at(tmp_path / "pool", "fs")
    for writer, reader, keys in ((by_nixl, by_calls, KEYS[:3]), (by_calls, by_nixl, KEYS[3:])):
        assert writer.write(records_of(keys, size), LONG_S) == [DONE] * 3
        assert reader.write(records_of(keys, size), LONG_S) == [ALREADY_THERE] * 3
        wanted = wanted_of(keys, size)
        check_read(reader.read(wanted, LONG_S), wanted, [0, 1, 2])
    by_nixl.close()
    by_calls.close()


def test_holes_in_a_batch_shift_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are seen before, and do not fail the others' transfer."""
    medium = medium_at(tmp_path / "pool")
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    paths = [next((tmp_path / "pool/chunks").rglob(key[32:].hex())) for key in KEYS]
    paths[0].unlink()
    os.truncate(paths[2], 4096)
    os.truncate(paths[4], 0)
    wanted = wanted_of(KEYS)
    found = medium.read(wanted, LONG_S)
    assert (found[0], found[2], found[4]) == (ABSENT, TRUNCATED, TRUNCATED)
    check_read(found, wanted, [1, 3, 5])
    assert [bytes(wanted[idx].payload) for idx in (0, 2, 4)] == [bytes(SIZE)] * 3
    assert caplog.text == ""
    medium.close()


def test_no_records_at_all(tmp_path: Path) -> None:
    medium = medium_at(tmp_path / "pool")
    assert medium.read([], LONG_S) == []
    assert medium.write([], LONG_S) == []
    medium.close()


# Transfers that fail.


def file_of(path: Path, content: bytes, flags: int = os.O_RDWR) -> int:
    path.write_bytes(content)
    return os.open(path, flags)


@pytest.fixture
def given_up() -> list[Any]:
    return []


@pytest.fixture(params=["use_uring", "use_aio"])
def engine(request: pytest.FixtureRequest, given_up: list[Any]) -> FileTransfers:
    return FileTransfers(Plugin("POSIX", {request.param: "true"}), 1 << 20, given_up)


def pieces_of(fds: list[int]) -> list[Piece]:
    return [Piece(fd, idx * 8192, 8192) for idx, fd in enumerate(fds)]


def contents(engine: FileTransfers, count: int) -> list[bytes]:
    return [bytes(engine.memory[idx * 8192 : (idx + 1) * 8192]) for idx in range(count)]


def test_a_batch_that_fails_is_done_one_by_one(
    engine: FileTransfers, given_up: list[Any], tmp_path: Path
) -> None:
    """Each record has its own outcome, and what may still be written to is used no more."""
    whole = [bytes([idx + 1]) * 8192 for idx in range(5)]
    fds = [
        file_of(tmp_path / "0", whole[0]),
        file_of(tmp_path / "1", whole[1], os.O_WRONLY),
        file_of(tmp_path / "2", whole[2]),
        file_of(tmp_path / "3", whole[3][:5000]),
        file_of(tmp_path / "4", whole[4]),
    ]
    former = engine.memory
    assert engine.move(pieces_of(fds), write=False) == [8192, -errno.EBADF, 8192, 5000, 8192]
    found = contents(engine, 5)
    assert [found[0], found[2], found[4]] == [whole[0], whole[2], whole[4]]
    assert engine.memory is not former
    assert [agent.memory is former for agent in given_up] == [True]
    assert engine.move(pieces_of([fds[4], fds[0]]), write=False) == [8192, 8192]
    assert contents(engine, 2) == [whole[4], whole[0]]
    assert len(given_up) == 1
    for fd in fds:
        os.close(fd)


def test_a_write_that_fails_says_why(engine: FileTransfers, tmp_path: Path) -> None:
    engine.memory[:8192] = b"a" * 8192
    engine.memory[8192:16384] = b"b" * 8192
    engine.memory[16384:24576] = b"c" * 8192
    fds = [
        file_of(tmp_path / "0", b""),
        os.open("/dev/full", os.O_WRONLY),
        file_of(tmp_path / "2", b""),
    ]
    assert engine.move(pieces_of(fds), write=True) == [8192, -errno.ENOSPC, 8192]
    assert (tmp_path / "0").read_bytes() == b"a" * 8192
    assert (tmp_path / "2").read_bytes() == b"c" * 8192
    for fd in fds:
        os.close(fd)


def test_one_record_that_fails_costs_no_memory(
    engine: FileTransfers, given_up: list[Any], tmp_path: Path
) -> None:
    fd = file_of(tmp_path / "0", b"x" * 8192, os.O_WRONLY)
    for _ in range(40):
        assert engine.move(pieces_of([fd]), write=False) == [-errno.EBADF]
    assert given_up == []
    os.close(fd)


def test_what_is_given_up_is_bounded(
    engine: FileTransfers, given_up: list[Any], tmp_path: Path
) -> None:
    """After so many failed batches there are none any more, and every record is still right."""
    good, more = (file_of(tmp_path / name, b"x" * 8192) for name in "02")
    bad = file_of(tmp_path / "1", b"y" * 8192, os.O_WRONLY)
    for _ in range(40):
        found = engine.move(pieces_of([good, bad, more]), write=False)
        assert found == [8192, -errno.EBADF, 8192]
        assert [contents(engine, 3)[idx] for idx in (0, 2)] == [b"x" * 8192] * 2
        engine.memory[: 3 * 8192] = bytes(3 * 8192)
    assert len(given_up) == 16
    for fd in (good, bad, more):
        os.close(fd)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount_memory(path, 1 << 20)
    try:
        yield path
    finally:
        unmount(path)


def test_a_full_disk(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of each record it is said whether there was room for it."""
    mover = TransferMover("nixl", lambda size: FileTransfers(URING, size, []), direct=True)
    mover.check(str(small))
    paths = [f"{small}/{idx}" for idx in range(4)]
    written = mover.write(paths, records_of(KEYS[:4], 400 << 10), LONG_S)
    full = ChunkResult(Outcome.FULL, Reason.NO_SPACE)
    assert sorted(written, key=str) == sorted([DONE, DONE, full, full], key=str)
    assert "NIXL failed; by system calls" in caplog.text
    for path in paths:
        os.unlink(path)
    assert mover.write(paths[:2], records_of(KEYS[:2], 400 << 10), LONG_S) == [DONE] * 2
    mover.close()


def test_files_that_must_not_grow(tmp_path: Path) -> None:
    """The medium says what a write by system calls would have said."""
    program = f"""
import resource, sys
from tests.media.test_nixl import *
medium = medium_at(Path({str(tmp_path)!r}) / "pool")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
print(medium.write(records_of(KEYS[:2]), 30.0))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
print(medium.write(records_of(KEYS[:2]), 30.0) == [DONE] * 2)
medium.close()
"""
    out = run_python(program)
    assert out.count("IO_ERROR") == 2
    assert out.endswith("True\n")
    assert list((tmp_path / "pool/temp").iterdir()) == []


@pytest.mark.parametrize(
    "error", [ConfigError("no agent"), OSError("no file"), RuntimeError("odd")]
)
def test_a_write_that_raises_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Files of a write whose transfer failed, and for which there was no agent any more, stayed."""
    medium = medium_at(tmp_path / "pool")
    moves = 0

    def move(self: object, kind: str, ends: list[object], *_: object, **__: object) -> list[bool]:
        nonlocal moves
        moves += 1
        return [moves == 1] * len(ends)  # those of the second group fail

    def refuse(*_: object) -> None:
        raise error

    many = [key_of(f"many {idx}") for idx in range(70)]
    with monkeypatch.context() as patch:
        patch.setattr(nixl.Agent, "move", move)
        patch.setattr(nixl, "Agent", refuse)
        with pytest.raises((TierError, RuntimeError)):
            medium.write(records_of(many, 64), LONG_S)
    assert moves == 2
    assert list((tmp_path / "pool/temp").iterdir()) == []
    assert medium.write(records_of(many, 64), LONG_S) == [DONE] * 70
    medium.close()


def test_a_write_that_ends_as_it_is_given_up_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread had found nobody who gave up, and the caller left the files to the thread."""
    medium = medium_at(tmp_path / "pool")
    run = TakenEngine.run

    def run_late(taken: TakenEngine[Any], work: Callable[[], Any]) -> None:
        run(taken, work)
        raise TierError("no answer in time")

    with monkeypatch.context() as patch:
        patch.setattr(TakenEngine, "run", run_late)
        with pytest.raises(TierError, match="in time"):
            medium.write(records_of(KEYS), LONG_S)
    assert list((tmp_path / "pool/temp").iterdir()) == []
    medium.close()


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_agent_that_cannot_be_replaced(
    given_up: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has failed is not used again, whatever becomes of the next."""
    engines = TransferEngines("nixl", lambda size_bytes: FileTransfers(URING, size_bytes, given_up))
    good = file_of(tmp_path / "0", b"x" * 8192)
    bad = file_of(tmp_path / "1", b"y" * 8192, os.O_WRONLY)
    with monkeypatch.context() as patch, engines.taken(8192, LONG_S) as taken:
        engine = taken.engine

        def refuse(*_: object) -> None:
            raise ConfigError("no more rings")

        patch.setattr(nixl, "Agent", refuse)
        with pytest.raises(ConfigError):
            taken.run(lambda: engine.move(pieces_of([bad]), write=False))
        assert taken.run(lambda: engine.move(pieces_of([good]), write=False)) == [-errno.EIO]
    with engines.taken(8192, LONG_S) as taken:
        other = taken.engine
        assert other is not engine
        assert taken.run(lambda: other.move(pieces_of([good]), write=False)) == [8192]
        assert contents(other, 1) == [b"x" * 8192]
    engines.close()
    os.close(good)
    os.close(bad)


def test_more_records_than_files_may_be_open(tmp_path: Path) -> None:
    program = f"""
import resource
from tests.media.test_nixl import *
medium = medium_at(Path({str(tmp_path)!r}) / "pool")
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80,) * 2)
keys = [key_of(f"many {{idx}}") for idx in range(200)]
assert medium.write(records_of(keys, 64), 60.0) == [DONE] * 200
wanted = wanted_of(keys, 64)
check_read(medium.read(wanted, 60.0), wanted, list(range(200)))
medium.close()
"""
    run_python(program)


# Transfers that are late.


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A file whose reading takes as long as one likes."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def until(condition: Callable[[], bool]) -> None:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < LONG_S
        time.sleep(0.01)


def begin_late(engines: TransferEngines[FileTransfers], fd: int) -> FileTransfers:
    with engines.taken(8192, LONG_S):  # to be late with a transfer, and not with an agent
        pass
    with engines.taken(8192, 0.5) as taken:
        late = taken.engine
        with pytest.raises(TierError, match="in time"):
            taken.run(lambda: late.move(pieces_of([fd]), write=False))
    return late


def test_a_late_transfer_keeps_its_memory_until_it_is_over(
    pipe: tuple[int, int], tmp_path: Path
) -> None:
    engines = TransferEngines("nixl", lambda size_bytes: FileTransfers(URING, size_bytes, []))
    good = file_of(tmp_path / "0", b"g" * 8192)
    began_s = time.monotonic()
    late = begin_late(engines, pipe[0])
    assert time.monotonic() - began_s < LONG_S
    memory = late.memory
    for _ in range(3):
        with engines.taken(8192, LONG_S) as taken:
            other = taken.engine
            assert other is not late
            assert taken.run(lambda: other.move(pieces_of([good]), write=False)) == [8192]  # noqa: B023
            assert contents(other, 1) == [b"g" * 8192]
    os.write(pipe[1], b"l" * 8192)
    until(lambda: contents(late, 1) == [b"l" * 8192])
    with contextlib.ExitStack() as stack:  # the others first, as they were used last
        used = [stack.enter_context(engines.taken(8192, LONG_S)).engine for _ in range(32)]
        assert late in used
        assert other in used
    assert late.memory is memory
    assert contents(late, 1) == [b"l" * 8192]
    os.close(good)
    engines.close()


def test_what_is_no_file(tmp_path: Path) -> None:
    """Nothing is waited for, and nothing is followed."""
    medium = medium_at(tmp_path / "pool")
    medium.write(records_of(KEYS), LONG_S)
    paths = [next((tmp_path / "pool/chunks").rglob(key[32:].hex())) for key in KEYS]
    paths[1].rename(tmp_path / "elsewhere")
    paths[1].symlink_to(tmp_path / "elsewhere")
    paths[2].unlink()
    os.mkfifo(paths[2])
    paths[4].unlink()
    paths[4].mkdir()
    wanted = wanted_of(KEYS)
    found = medium.read(wanted, LONG_S)
    assert [found[idx] for idx in (1, 2, 4)] == [ChunkResult(Outcome.MISS, Reason.NOT_A_FILE)] * 3
    check_read(found, wanted, [0, 3, 5])
    medium.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FsSite]:
    site = FsSite(tmp_path)
    try:
        site.start_empty()
        yield site
    finally:
        site.close()


def test_a_file_system_that_hangs(site: FsSite, tmp_path: Path) -> None:
    """The caller has an answer in time, and what it wrote does not stay there half."""
    path = Path(MediumUrl.parse(site.url).path)
    medium: Any = medium_at(path)
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    site.pause()
    late = wanted_of(KEYS)
    began_s = time.monotonic()
    with pytest.raises(TierError, match="in time"):
        medium.read(late, 0.5)
    with pytest.raises(TierError, match="in time"):
        medium.write(records_of([key_of("new"), key_of("newer")]), 0.5)
    assert time.monotonic() - began_s < LONG_S
    site.resume()
    wanted = wanted_of(KEYS)
    check_read(medium.read(wanted, LONG_S), wanted, [0, 1, 2, 3, 4, 5])
    with contextlib.ExitStack() as stack:  # once all can be had none is late
        for _ in range(_LANES):
            stack.enter_context(medium._mover._engines._lanes.taken(0, LONG_S))
    assert os.listdir(tmp_path / "behind/pool/temp") == []
    assert [bytes(each.payload) for each in late] == [bytes(SIZE)] * 6
    medium.close()


def test_closing_does_not_wait_for_what_is_late(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stepwell.tiers.media.transfer_engines._CLOSE_WITHIN_S", 0.2)
    engines = TransferEngines("nixl", lambda size_bytes: FileTransfers(URING, size_bytes, []))
    begin_late(engines, pipe[0])
    engines.close()
    assert "not over" in caplog.text
    with pytest.raises(TierError, match="closed"), engines.taken(8192, 0.3):
        pass
    os.write(pipe[1], bytes(8192))


# What is refused.


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as found:
        open_medium(MediumUrl.parse(url), 1.0)
    text = str(found.value)
    assert "\n" not in text
    return text


def test_a_plugin_that_there_is_not() -> None:
    text = refusal("nixl+tape:///mnt/pool?capacity=1GiB")
    assert "is not there" in text
    assert "plugin=TAPE" in text
    assert "nixl+posix" in text
    assert "nixl+obj" in text
    assert "ucx" not in text


def test_a_plugin_that_does_not_load(capfd: pytest.CaptureFixture[str]) -> None:
    """It needs libraries of CUDA; or it does load, where they are."""
    if nixl._memory_types(nixl._new_agent(), "GDS"):
        pytest.skip("it loads here")
    text = refusal("nixl+gds:///mnt/pool?capacity=1GiB")
    assert "does not load here" in text
    assert "plugin=GDS" in text
    assert refusal("nixl+gds-mt:///mnt/pool?capacity=1GiB").count("plugin=GDS_MT") == 1
    assert capfd.readouterr().out == ""


def test_a_plugin_that_serves_no_files() -> None:
    assert "neither files nor objects" in refusal("nixl+gusli:///mnt/pool?capacity=1GiB")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nixl+posix:///mnt/pool", "is needed: nixl\\+posix:///mnt/pool\\?capacity"),
        ("nixl+posix://mnt/pool?capacity=1GiB", "three slashes"),
        ("nixl+posix:///mnt/pool?capacity=1GiB&api=epoll", "api is one of uring,aio:"),
        # What is left of a transfer that failed could be written to another file.
        ("nixl+posix:///mnt/pool?capacity=1GiB&api=posix_aio", "api is one of uring,aio:"),
        ("nixl+ucx:///mnt/pool?capacity=1GiB", "is for networks, and is not loaded"),
        ("nixl+libfabric:///mnt/pool?capacity=1GiB", "is for networks, and is not loaded"),
        ("nixl+posix:///mnt/pool?capacity=1GiB&apis=aio", 'no parameter "apis".*"api"'),
        ("nixl:///mnt/pool?capacity=1GiB", "no kind of storage"),
        ("nixl+:///mnt/pool?capacity=1GiB", "is not there"),
    ],
)
def test_a_wrong_url(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_medium(MediumUrl.parse(url), 1.0)


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if "nixl" in name else find(name)
    )
    assert "pip install --no-deps nixl-cu12: url" in refusal("nixl+posix:///mnt/pool?capacity=1GiB")


def forbid_io_uring() -> None:
    """To this process for good, as containers do: io_uring_setup is not permitted (x86-64)."""
    program = [
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, 425),
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.create_string_buffer(filters), 0, 0) == 0  # PR_SET_SECCOMP


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of another machine")
def test_where_io_uring_is_forbidden(tmp_path: Path) -> None:
    """The default failed there, and nothing said why."""
    program = f"""
from tests.media.test_nixl import *
import logging
logging.basicConfig(stream=sys.stdout)
forbid_io_uring()
print(refusal("nixl+posix://{tmp_path}/pool?capacity=64MiB&api=uring"))
for api in ({{}}, {{"api": "aio"}}):
    medium = medium_at(Path({str(tmp_path)!r}) / "pool", **api)
    medium.write(records_of(KEYS), 30.0)
    wanted = wanted_of(KEYS)
    check_read(medium.read(wanted, 30.0), wanted, list(range(6)))
    medium.close()
    print(api)
"""
    text, warning, *rest = run_python(program).splitlines()
    assert "io_uring is often forbidden" in text
    assert "api=uring error=NIXL's plugin does not start" in text
    assert "NIXL by api=aio" in warning
    assert "api=uring error=NIXL's plugin does not start" in warning
    assert rest == ["{}", "{'api': 'aio'}"]


def test_a_package_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version of CUDA, say: the next is tried."""
    (tmp_path / "nixl_of_another_cuda.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nixl, "NIXL_PACKAGES", ("nixl_of_another_cuda", "nixl_cu12"))
    medium_at(tmp_path / "pool").close()
    monkeypatch.setattr(nixl, "NIXL_PACKAGES", ("nixl_of_another_cuda",))
    text = refusal("nixl+posix:///mnt/pool?capacity=1GiB")
    assert "nixl_of_another_cuda: RuntimeError: two lines" in text


def test_nothing_goes_to_stdout_and_no_network_is_loaded(tmp_path: Path) -> None:
    """NIXL's log goes to stdout, where commands of ours write what others read; UCX, once begun,
    spins a core, listens on all networks, and ends the process with a signal.
    """
    program = f"""
from tests.media.test_nixl import *
medium = medium_at(Path({str(tmp_path)!r}) / "pool")
medium.write(records_of(KEYS), 30.0)
refusal("nixl+ucx:///mnt/pool?capacity=1GiB")
refusal("nixl+tape:///mnt/pool?capacity=1GiB")
maps = Path("/proc/self/maps").read_text()
assert "libplugin_POSIX" in maps and "libplugin_UCX" not in maps and "libucp" not in maps
medium.close()
"""
    assert run_python(program) == ""


def test_outcomes_are_those_of_the_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused for want of room is FULL, and the rest is written."""
    medium = medium_at(tmp_path / "pool", capacity="4MiB")
    records = records_of([key_of(f"large {idx}") for idx in range(30)], 400 << 10)
    assert medium.write(records[:1], LONG_S) == [DONE]
    monkeypatch.setattr(pool, "_WAIT_FOR_GRANT_S", 2.0)
    refused = ChunkResult(Outcome.FULL, Reason.CAPACITY)
    written = medium.write(records[1:], LONG_S)
    assert refused in written
    assert set(written) <= {DONE, refused}
    medium.close()
