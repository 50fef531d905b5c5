"""Reading and writing runs of neighbouring records in a file."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.record import HEADER_BYTES, PAGE_BYTES, record_bytes
from stepwell.testing import buffer_of
from stepwell.tiers import blockio
from stepwell.tiers.blockio import (
    MAX_RUN,
    probe_direct,
    read_page,
    read_run,
    write_page,
    write_run,
)

LENGTHS = [1, 4095, 4096, 4097, 8192, 100_000]


def header_of(idx: int) -> bytes:
    return bytes([idx % 256]) * HEADER_BYTES


def data_of(idx: int, length: int) -> bytes:
    return (idx.to_bytes(4, "little") * (length // 4 + 1))[:length]


class File:
    """An open file, with O_DIRECT or without."""

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.fd = os.open(path, flags, 0o644)

    def write(self, idxs: Sequence[int], length: int, at: int = 0, offset: int = 0) -> None:
        """Neighbouring records from number ``at`` on, from buffers ``offset`` into a page."""
        payloads = [buffer_of(length, data_of(idx, length), offset) for idx in idxs]
        write_run(self.fd, at * record_bytes(length), [header_of(i) for i in idxs], payloads)

    def read(self, count: int, length: int, at: int = 0, offset: int = 0) -> list[Any]:
        """Of neighbouring records (header, payload), None where the file ends before."""
        payloads = [buffer_of(length, b"\xee" * length, offset) for _ in range(count)]
        pages = read_run(self.fd, at * record_bytes(length), payloads)
        return [
            None if page is None else (bytes(page), bytes(payload))
            for page, payload in zip(pages, payloads, strict=True)
        ]


def records_of(idxs: Sequence[int], length: int) -> list[Any]:
    return [(header_of(idx), data_of(idx, length)) for idx in idxs]


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[File]:
    """Past the page cache only where the file system can; then both are the same."""
    (tmp_path / "probe").mkdir()
    made = File(tmp_path / "file", bool(request.param) and probe_direct(str(tmp_path / "probe")))
    yield made
    os.close(made.fd)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("offset", [0, 1, 512])
def test_what_is_written_is_read(file: File, length: int, offset: int) -> None:
    file.write(range(5), length, at=2, offset=offset)
    file.write([9, 8], length, at=4, offset=offset)
    lying = file.path.read_bytes()[2 * record_bytes(length) :]
    padding = bytes(record_bytes(length) - HEADER_BYTES - length)
    expected = [0, 1, 9, 8, 4]
    assert lying == b"".join(header_of(i) + data_of(i, length) + padding for i in expected)
    assert file.read(5, length, at=2, offset=offset) == records_of(expected, length)
    assert file.read(1, length, at=5) == records_of([8], length)


def test_buffers_of_every_kind_in_one_run(file: File) -> None:
    """Aligned or not, as long as a page or shorter, as long as all are padded to the same."""
    lengths = [8192, 8192, 5000, 4097, 8192]
    offsets = [0, 1, 0, 0, 0]
    each = list(zip(range(5), lengths, offsets, strict=True))
    payloads = [buffer_of(length, data_of(idx, length), offset) for idx, length, offset in each]
    write_run(file.fd, 0, [header_of(idx) for idx in range(5)], payloads)
    targets = [buffer_of(length, b"", offset) for _, length, offset in each[::-1]][::-1]
    pages = read_run(file.fd, 0, targets)
    assert [bytes(page or b"") for page in pages] == [header_of(idx) for idx in range(5)]
    assert [bytes(target) for target in targets] == [data_of(i, n) for i, n, _ in each]


def test_a_source_that_cannot_be_written_to(file: File) -> None:
    write_run(file.fd, 0, [header_of(1)], [memoryview(data_of(1, 8192))])
    assert file.read(1, 8192) == records_of([1], 8192)


def test_nothing_beside_a_buffer_is_touched(file: File) -> None:
    file.write([7], 5000)
    around = buffer_of(5000 + 200, b"\xa5" * 5200)
    read_run(file.fd, 0, [around[100:5100]])
    assert bytes(around) == b"\xa5" * 100 + data_of(7, 5000) + b"\xa5" * 100


def test_the_rest_of_a_longer_write_is_not_padding(file: File) -> None:
    """A thread's buffer is used again; what it held before must not reach the drive."""
    payloads = [memoryview(b"\xff" * 12_000)]
    write_run(file.fd, 0, [b"\xff" * HEADER_BYTES], payloads)
    write_run(file.fd, 0, [header_of(1)], [memoryview(b"0123456789")])
    assert file.path.read_bytes()[:8192] == header_of(1) + b"0123456789" + bytes(4086)


def test_the_longest_run(file: File) -> None:
    """One call each way: two buffers per record is what the system takes."""
    file.write(range(MAX_RUN), 4096)
    assert file.read(MAX_RUN, 4096) == records_of(range(MAX_RUN), 4096)


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 8192, 8193, 12287])
def test_a_file_that_ends_too_early(file: File, cut: int) -> None:
    """Records before the end are whole, one that the end cuts through is not there."""
    file.write(range(3), 8192)
    os.truncate(file.path, record_bytes(8192) + cut)
    assert file.read(3, 8192) == [*records_of([0], 8192), None, None]
    assert file.read(1, 8192, at=7) == [None]


def test_short_calls_go_on(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move less than asked; the rest follows, in whole pages."""
    calls = {"preadv": 0, "pwritev": 0}

    def one_page(name: str) -> Any:
        real = getattr(os, name)

        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls[name] += 1
            first = next(buffer for buffer in buffers if len(buffer))
            moved: int = real(fd, [first[:PAGE_BYTES]], offset)
            return moved

        return call

    for name in calls:
        monkeypatch.setattr(blockio.os, name, one_page(name))
    for length, pages in ((8192, 3), (5000, 3), (70_000, 19)):
        calls.update(preadv=0, pwritev=0)
        file.write(range(3), length)
        assert calls["pwritev"] == 3 * pages
        assert file.read(3, length) == records_of(range(3), length)
        assert calls["preadv"] == 3 * pages


def test_a_write_that_fails_in_the_middle(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def one_page_then_full(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, [buffers[0][:4096]], 0)

    monkeypatch.setattr(blockio.os, "pwritev", one_page_then_full)
    with pytest.raises(OSError, match="full"):
        file.write([1], 8192)


@pytest.mark.timeout(60)
def test_a_write_that_no_longer_advances(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing written and no error: no endless loop."""
    monkeypatch.setattr(blockio.os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="No space"):
        file.write([1], 8192)
    with pytest.raises(OSError, match="No space"):
        write_page(file.fd, 0, header_of(1))


def test_pages(file: File) -> None:
    file.write(range(2), 8192)
    write_page(file.fd, record_bytes(8192), header_of(9))
    assert bytes(read_page(file.fd, record_bytes(8192))) == header_of(9)
    assert bytes(read_page(file.fd, 0)) == header_of(0)
    assert file.read(2, 8192)[1] == (header_of(9), data_of(1, 8192)), "and nothing behind it"
    assert len(read_page(file.fd, 100 * PAGE_BYTES)) == 0


def test_threads_do_not_share_their_buffers(file: File) -> None:
    """Headers stay what they are until the same thread's next call."""
    file.write(range(40), 5000)
    wrong: list[int] = []
    barrier = threading.Barrier(4)

    def read_again_and_again(first: int) -> None:
        for _ in range(50):
            payloads = [buffer_of(5000) for _ in range(10)]
            pages = read_run(file.fd, first * record_bytes(5000), payloads)
            barrier.wait(30)  # everybody has read before anybody looks
            for idx, (page, payload) in enumerate(zip(pages, payloads, strict=True), first):
                right = bytes(page or b"") == header_of(idx)
                if not right or bytes(payload) != data_of(idx, 5000):
                    wrong.append(idx)

    threads = [threading.Thread(target=read_again_and_again, args=(n,)) for n in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    assert isinstance(probe_direct(str(tmp_path)), bool)
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        probe_direct(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("open", errno.EINVAL, False),
        ("open", errno.EOPNOTSUPP, False),
        ("pwrite", errno.EINVAL, False),
        ("preadv", errno.EINVAL, False),
        ("pwrite", errno.ENOSPC, True),
        ("pwrite", errno.EDQUOT, True),
        ("pwrite", errno.EIO, None),
        ("open", errno.EROFS, None),
    ],
)
def test_what_the_probe_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, expected: bool | None
) -> None:
    """Direct unless the file system does not know it; a full disk says nothing about that."""
    real_open, real = os.open, getattr(os, call)
    direct: set[int] = set()

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        if call == "open" and (flags & os.O_DIRECT or expected is None):
            raise OSError(error, os.strerror(error))
        fd = real_open(path, flags & ~os.O_DIRECT, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def failing(fd: int, *args: Any) -> Any:
        if fd in direct or expected is not False:
            raise OSError(error, os.strerror(error))
        return real(fd, *args)

    monkeypatch.setattr(blockio.os, "open", opened)
    if call != "open":
        monkeypatch.setattr(blockio.os, call, failing)
    before = len(os.listdir("/proc/self/fd"))
    if expected is None:
        with pytest.raises(OSError, match=os.strerror(error)):
            probe_direct(str(tmp_path))
    else:
        assert probe_direct(str(tmp_path)) is expected
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before
