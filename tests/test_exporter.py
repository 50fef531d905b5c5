"""The exporter: a running store's counters over HTTP or in a file; `inspect` reads the same."""

import socket
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest

from stepwell.core.types import Chunk
from stepwell.errors import ConfigError
from stepwell.exporter import Exporter
from stepwell.metrics import DEFINITIONS, GAUGES, Metrics
from stepwell.ops.inspect import inspect_store
from stepwell.ops.report import inspect_json, inspect_text
from stepwell.settings import Settings, parse_target
from stepwell.store import Store
from stepwell.testing import buffer_of, key_of

SIZE = 4096


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def open_store(path: Path, metrics: str) -> Store:
    return Store.open(
        Settings((path,), 1 << 20, min_free_bytes=0, host_capacity_bytes=1 << 20, metrics=metrics)
    )


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def use(store: Store) -> None:
    store.write([Chunk(key_of(idx), buffer_of(SIZE)) for idx in range(5)])
    store.drain(30)
    store.read([Chunk(key_of(idx), buffer_of(SIZE)) for idx in range(7)])
    store.drain(30)


def test_a_port(tmp_path: Path) -> None:
    port = free_port()
    store = open_store(tmp_path / "kv", f"127.0.0.1:{port}")
    try:
        use(store)
        text = fetch(port)
    finally:
        store.close()
    assert f'stepwell_write_bytes_total{{tier="disk"}} {5.0 * SIZE}' in text
    assert 'stepwell_read_chunks_total{outcome="done",reason="",tier="host"} 5.0' in text
    assert 'stepwell_breaker_open{tier="disk"} 0.0' in text
    with pytest.raises(URLError):
        fetch(port)


def test_a_file_is_written_at_once_and_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "metrics.prom"
    store = open_store(tmp_path / "kv", str(target))
    assert "stepwell_used_bytes" in target.read_text()
    use(store)
    store.close()
    assert f'stepwell_write_bytes_total{{tier="disk"}} {5.0 * SIZE}' in target.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("metrics")] == [
        "metrics.prom"
    ]


@pytest.mark.parametrize("kind", ["port", "file"])
def test_inspect_reads_the_same(tmp_path: Path, kind: str) -> None:
    target = f"127.0.0.1:{free_port()}" if kind == "port" else str(tmp_path / "metrics.prom")
    store = open_store(tmp_path / "kv", target)
    try:
        metrics = store.context.metrics
        metrics.add("asked_tokens", (), 1000)
        metrics.add("served_tokens", ("disk",), 600)
        metrics.add("missed_tokens", ("absent",), 300)
        metrics.add("missed_tokens", ("not_worth",), 100)
        if kind == "file":
            store.close()
            store = open_store(tmp_path / "kv", target)
            store.context.metrics.add("asked_tokens", (), 1)
        report = inspect_store(tmp_path / "kv")
    finally:
        store.close()
    text = inspect_text(report)
    if kind == "port":
        assert "tokens asked 1,000 = disk 600 + missed, absent 300 + missed, not_worth 100" in text
    assert report.live is not None
    assert report.live.error == ""
    live = inspect_json(report)["live"]
    assert isinstance(live, dict)
    assert {each["name"] for each in live["metrics"]} >= {"used_bytes", "breaker_open"}
    assert inspect_store(tmp_path / "kv").live is None, "nobody exports any more"


def test_inspect_says_why_there_is_nothing_to_read(tmp_path: Path) -> None:
    target = tmp_path / "metrics.prom"
    store = open_store(tmp_path / "kv", str(target))
    try:
        target.unlink()
        target.mkdir()
        text = inspect_text(inspect_store(tmp_path / "kv"))
    finally:
        store.close()
    assert f"counters: cannot be read at {target}: " in text


def test_every_counter_and_gauge_is_described() -> None:
    port = free_port()
    exporter = Exporter(("127.0.0.1", port), Metrics(), dict)
    try:
        text = fetch(port)
    finally:
        exporter.close()
        exporter.close()
    for definition in (*DEFINITIONS, *GAUGES):
        assert f"# HELP stepwell_{definition.name}" in text


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot be exported.*metrics={target}"):
            open_store(tmp_path / "kv", target)
    open_store(tmp_path / "kv", "").close()  # nothing was left open


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be exported"):
        open_store(tmp_path / "kv", str(tmp_path / "missing" / "metrics.prom"))
    open_store(tmp_path / "kv", "").close()


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("127.0.0.1:9477", ("127.0.0.1", 9477)),
        ("localhost:1", ("localhost", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("/run//stepwell.prom", "/run/stepwell.prom"),
    ],
)
def test_targets(text: str, target: tuple[str, int] | str) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("", "no port"), ("9477", "no host"), (":9477", "no host"), ("localhost", "no port"),
     ("[::1]", "no port"), ("host:0", "the port is"), ("host:65536", "the port is"),
     ("host:x", "the port is"), ("host:", "the port is"), ("host:" + "9" * 5000, "the port is"),
     ("relative.prom", "no port"), ("::1:9477", "the host is"), ("a b:1", "the host is"),
     ("http://host:1", "no scheme")]
)  # fmt: skip
def test_what_is_no_target(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics is an address .*; .*{wrong}"):
        parse_target(text)
