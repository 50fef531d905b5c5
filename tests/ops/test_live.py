"""The counters of a running engine: whatever answers there, an answer within two seconds."""

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ops.stores import SLOT_BYTES, identity, keys_of, opened, write_keys, write_store
from stepwell import cli
from stepwell.exporter import Exporter
from stepwell.metrics import Metrics
from stepwell.ops.inspect import inspect_store
from stepwell.ops.live import LiveCounters, read_live
from stepwell.ops.report import inspect_json, inspect_text
from stepwell.tiers.directory import StoreDirectory

OK = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"
BODY = b'# TYPE stepwell_used_bytes gauge\nstepwell_used_bytes{tier="disk"} 5.0\n'


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server for one request; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    """A store that this process owns."""
    directory = StoreDirectory(tmp_path / "kv")
    directory.open()
    yield directory
    directory.close()


def read(directory: StoreDirectory, target: str) -> LiveCounters:
    directory.note_metrics(target)
    began_s = time.monotonic()
    found = read_live(directory)
    assert time.monotonic() - began_s < 4, "two seconds, and a busy machine"
    assert found is not None
    assert found.target == target
    return found


def drip(what: bytes) -> Callable[[socket.socket], None]:
    """A few bytes now and then, never so late that a single read would be too long."""

    def answer(connection: socket.socket) -> None:
        for idx in range(60):
            connection.sendall(what[idx % len(what) :][:1])
            time.sleep(0.1)

    return answer


def sending(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


GOOD = {
    "closed at the end": OK + BODY,
    "with a length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "in pieces": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    % (len(BODY), BODY),
}
BAD = {
    "nothing": sending(b""),
    "no status line": sending(b"\0\0\0\0 what\r\n\r\n"),
    "an endless status line": sending(b"HTTP/1.0 " + b"2" * 100_000),
    "another status": sending(b"HTTP/1.0 404 Not Found\r\n\r\nno"),
    "a redirection": sending(b"HTTP/1.0 302 Found\r\nLocation: file:///\r\n\r\n"),
    "very many headers": sending(b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 1000),
    "less than its length": sending(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + BODY),
    "a wrong piece": sending(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "no text": sending(OK + b"\xff\xfe"),
    "another format": sending(OK + b"stepwell_used_bytes{{{\n"),
    "too much": sending(OK + BODY * 100_000),
    "a long line": sending(OK + b"stepwell_a{" + b'b="c",' * 500_000 + b"} 1\n"),
    "nothing at all": lambda connection: time.sleep(4),
    "a header, bit by bit": drip(b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 50),
    "a body, bit by bit": lambda connection: (connection.sendall(OK), drip(b"#  \n")(connection)),
}  # fmt: skip


@pytest.mark.parametrize("how", GOOD)
def test_whatever_a_good_answer_looks_like(directory: StoreDirectory, how: str) -> None:
    with serving(sending(GOOD[how])) as target:
        found = read(directory, target)
    assert found.error == ""
    assert found.by("used_bytes", "tier") == {"disk": 5.0}


@pytest.mark.parametrize("how", BAD)
def test_whatever_answers_there(directory: StoreDirectory, how: str) -> None:
    """A status line that is none ended `stepwell inspect` with a traceback, and a server that sent
    a byte now and then was waited for without end."""
    with serving(BAD[how]) as target:
        directory.note_metrics(target)
        began_s = time.monotonic()
        report = inspect_store(directory.path, shm_dir=directory.path)
        assert time.monotonic() - began_s < 4, "two seconds, and a busy machine"
    assert report.live is not None
    assert report.live.values == {}
    assert report.live.error
    assert report.live.error.isprintable()
    assert f"counters: cannot be read at {target}: {report.live.error}" in inspect_text(report)


def test_nobody_answers_there(directory: StoreDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
    assert "refused" in read(directory, target).error
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:  # connects, is not served
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        assert "timed out" in read(directory, target).error or "longer" in read(
            directory, target
        ).error  # fmt: skip


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
def test_where_the_real_exporter_listens(directory: StoreDirectory, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    exporter = Exporter(
        ("127.0.0.1" if host == "localhost" else host, port),
        Metrics(),
        lambda: {("written_bytes", "disk"): 7.0},
    )
    try:
        assert read(directory, f"{host}:{port}").by("written_bytes", "tier") == {"disk": 7.0}
    finally:
        exporter.close()


def test_where_a_family_of_addresses_is_off(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With IPv6 off "localhost" was never tried by IPv4: making the socket had failed already."""
    addresses = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)
    off = [(socket.AF_INET6, socket.SOCK_STREAM, -1, "", ("::1", 1, 0, 0))]
    with serving(sending(GOOD["with a length"])) as target:
        port = int(target.rpartition(":")[2])
        here = [(*each[:4], ("127.0.0.1", port)) for each in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*off, *here])
        assert read(directory, f"localhost:{port}").error == ""
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: off)
        assert read(directory, f"localhost:{port}").error


def test_whatever_the_text_is(directory: StoreDirectory, tmp_path: Path) -> None:
    """It is read or refused, also where the client library's parser stumbles over it."""
    directory.note_metrics(str(tmp_path / "metrics"))

    @given(st.text(st.sampled_from('stepwell_{}="\\,# TYPE\n01e+NaInf'), max_size=80))
    @example('stepwell_a{b="c" 1')
    @example("# TYPE\nstepwell_")
    def is_read(text: str) -> None:
        (tmp_path / "metrics").write_text(text)
        found = read_live(directory)
        assert found is not None
        assert not (found.error and found.values)

    is_read()


def test_a_file_that_is_too_large(directory: StoreDirectory, tmp_path: Path) -> None:
    """What was cut off at a limit was taken for all there is."""
    (tmp_path / "metrics").write_bytes(BODY * 100_000)
    assert "more than an engine exports" in read(directory, str(tmp_path / "metrics")).error


def test_values_that_json_has_not(directory: StoreDirectory, tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("stepwell_written_bytes NaN\nstepwell_used_bytes +Inf\n")
    directory.note_metrics(str(tmp_path / "metrics"))
    report = inspect_store(directory.path, shm_dir=tmp_path)
    text = json.dumps(inspect_json(report), allow_nan=False)
    assert '"value": null' in text
    assert report.live is not None
    assert math.isnan(report.live.total("written_bytes"))
    assert inspect_text(report)


# What was written to the drive.


def test_what_a_running_engine_wrote(tmp_path: Path) -> None:
    """The journal's last note was that of the start: "0 B written", beside live counters that
    said otherwise."""
    path, target = tmp_path / "kv", tmp_path / "metrics"
    with opened(path) as tier:
        write_keys(tier, identity(), keys_of(identity().root))
        target.write_text(f'stepwell_written_bytes{{tier="disk"}} {5 << 20}\n')
        tier.note_metrics(str(target))
        report = inspect_store(path, shm_dir=tmp_path)
        assert report.wear is not None
        assert report.wear.written_bytes == 5 << 20
        assert report.wear.as_of_s == report.now_s
        assert "wear: 5.0 MiB written since" in inspect_text(report)
        assert " ago)" not in inspect_text(report)
        # Those of several drives do not say which is which.
        target.write_text("".join(
            f'stepwell_written_bytes{{tier="disk{idx}"}} {idx << 20}\n' for idx in (7, 9)
        ))  # fmt: skip
        report = inspect_store(path, shm_dir=tmp_path)
        assert report.wear is not None
        assert report.wear.written_bytes < 1 << 20
        assert "as it was " in inspect_text(report)


def test_as_of_when_the_number_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv"
    write_store(path)
    closed = inspect_store(path, shm_dir=tmp_path)
    assert closed.wear is not None
    assert closed.wear.written_bytes > 3 * SLOT_BYTES
    assert "as it was" not in inspect_text(closed), "it was noted at the end"
    with opened(path):
        report = inspect_store(path, shm_dir=tmp_path)
        assert report.wear is not None
        age_s = report.now_s - report.wear.as_of_s
        assert 0 <= age_s < 60
        assert f", as it was {age_s:.0f} s ago)" in inspect_text(report)
        assert cli.main(["inspect", "--json", str(path)]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["wear"]["as_of_age_s"] < 60
