"""Reading and writing one record file."""

import errno
import os
from pathlib import Path

import pytest

from stepwell.core.record import HEADER_BYTES, record_bytes
from stepwell.core.types import Reason
from stepwell.errors import DataError
from stepwell.testing import buffer_of
from stepwell.tiers.blockio import probe_direct, read_record, write_record

HEADER = bytes(range(256)) * 16
LENGTHS = [1, 4095, 4096, 4097, 8192, 100_000]


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    """Past the page cache only where the file system can; then both are the same."""
    return bool(request.param) and probe_direct(str(tmp_path))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("offset", [0, 1, 512])
def test_what_is_written_is_read(tmp_path: Path, direct: bool, length: int, offset: int) -> None:
    path = str(tmp_path / "record")
    data = os.urandom(length)
    write_record(path, HEADER, buffer_of(length, data, offset), direct=direct)
    content = Path(path).read_bytes()
    assert content == HEADER + data + bytes(record_bytes(length) - HEADER_BYTES - length)
    target = buffer_of(length, b"", offset)
    page = read_record(path, target, direct=direct)
    assert bytes(page) == HEADER
    assert bytes(target) == data


def test_the_rest_of_a_longer_write_is_not_padding(tmp_path: Path, direct: bool) -> None:
    """A thread's buffer is used again; what it held before must not reach the medium."""
    write_record(str(tmp_path / "long"), HEADER, buffer_of(12_000, b"\xff" * 12_000), direct=direct)
    write_record(str(tmp_path / "short"), HEADER, buffer_of(10, b"0123456789"), direct=direct)
    assert (tmp_path / "short").read_bytes() == HEADER + b"0123456789" + bytes(4086)


def test_a_record_is_never_overwritten(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "record"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_record(str(path), HEADER, buffer_of(4096), direct=direct)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8191])
def test_a_file_that_is_too_short(tmp_path: Path, direct: bool, size: int) -> None:
    path = tmp_path / "record"
    write_record(str(path), HEADER, buffer_of(4096), direct=direct)
    os.truncate(path, size)
    with pytest.raises(DataError) as caught:
        read_record(str(path), buffer_of(4096), direct=direct)
    assert caught.value.reason == Reason.TRUNCATED


def test_links_are_not_followed_and_pipes_not_waited_for(tmp_path: Path, direct: bool) -> None:
    write_record(str(tmp_path / "record"), HEADER, buffer_of(4096), direct=direct)
    (tmp_path / "link").symlink_to("record")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "nothing"):
        with pytest.raises(OSError):  # noqa: PT011 (the kernel's choice which)
            read_record(str(tmp_path / name), buffer_of(4096), direct=direct)


def test_a_failed_write_leaves_no_file(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had written before it failed."""
    real = os.pwritev

    def one_page_then_full(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, [buffers[0][:4096]], 0)

    monkeypatch.setattr(os, "pwritev", one_page_then_full)
    with pytest.raises(OSError, match="full"):
        write_record(str(tmp_path / "record"), HEADER, buffer_of(8192), direct=direct)
    assert os.listdir(tmp_path) == []


def test_no_file_is_left_open(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "record"
    before = len(os.listdir("/proc/self/fd"))
    write_record(str(path), HEADER, buffer_of(4096), direct=direct)
    read_record(str(path), buffer_of(4096), direct=direct)
    with pytest.raises(DataError):
        read_record(str(path), buffer_of(9000), direct=direct)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    assert isinstance(probe_direct(str(tmp_path)), bool)
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        probe_direct(str(tmp_path / "nowhere"))
