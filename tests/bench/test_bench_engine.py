"""The demo end to end with a real vLLM: a tiny model, a fresh process, equal answers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from media.sites import SITES

from stepwell.bench import procs
from stepwell.bench.demo import DemoOptions, run_demo
from stepwell.bench.model import make_model, make_sliding_window_model
from stepwell.bench.report import to_text
from stepwell.bench.results import DEVICE, DISK, RECOMPUTE, Row
from stepwell.bench.server import Server, ServerConfig, ServerError
from stepwell.core.types import Reason
from stepwell.tiers.media.kinds import open_medium
from stepwell.tiers.media.roots import described_roots
from stepwell.tiers.media.urls import MediumUrl

pytestmark = pytest.mark.engine

DEMO_KINDS = {"3fs", "fs", "mooncake", "redis", "s3"}

TINY = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 512, "vocab": 2048}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    return make_model(tmp_path_factory.mktemp("model") / "tiny", **TINY)  # type: ignore[arg-type]


def test_models_are_made_once_and_equal_for_equal_seeds(tiny_model: Path, tmp_path: Path) -> None:
    changed_ns = (tiny_model / "model.safetensors").stat().st_mtime_ns
    assert make_model(tiny_model, **TINY) == tiny_model  # type: ignore[arg-type]
    assert (tiny_model / "model.safetensors").stat().st_mtime_ns == changed_ns
    again = make_model(tmp_path / "again", **TINY)  # type: ignore[arg-type]
    other = make_model(tmp_path / "other", seed=1, **TINY)  # type: ignore[arg-type]
    hybrid = make_sliding_window_model(tmp_path / "hybrid")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (tiny_model / name).read_bytes()
        assert (hybrid / name).is_file()
    assert (other / "model.safetensors").read_bytes() != (
        tiny_model / "model.safetensors"
    ).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hybrid", "other"]


def test_a_fresh_engine_reads_what_another_wrote(tiny_model: Path, tmp_path: Path) -> None:
    options = DemoOptions(
        model=str(tiny_model),
        path=str(tmp_path),
        sessions=2,
        concurrencies=(1,),
        prompt_tokens=600,
        capacity="1GiB",
    )
    result = run_demo(options)
    print(to_text(result))
    assert [row.mode for row in result.rows] == [RECOMPUTE, DISK, DEVICE]
    recompute, disk, device = result.rows
    assert result.ok
    assert recompute.tokens.computed == 1200
    assert (recompute.bytes_read, disk.tokens.host) == (0, 0)
    assert (disk.tokens.disk, disk.tokens.device) == (_read_if_worth(disk), 0)
    assert (device.tokens.device, device.tokens.computed) == (1024, 176)
    assert disk.bytes_read >= disk.tokens.disk * 2 * 2 * 2 * 64 * 4
    assert set(result.speedups()) == {1}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", sorted(DEMO_KINDS))
def test_shared_storage_as_the_only_tier_below_the_host(
    kind: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Every token that is reused is accounted to it, and what was written is erased."""
    (tmp_path / "site").mkdir()
    (tmp_path / "work").mkdir()
    site = SITES[kind](tmp_path / "site")
    try:
        site.start_empty()
        options = DemoOptions(
            model=str(tiny_model),
            path=str(tmp_path / "work"),
            sessions=2,
            concurrencies=(1,),
            prompt_tokens=600,
            url=site.url,
        )
        result = run_demo(options)
        print(to_text(result))
        with contextlib.closing(open_medium(MediumUrl.parse(site.url), 10.0)) as medium:
            medium.check()
            assert not described_roots(medium)
    finally:
        site.close()
    assert [row.mode for row in result.rows] == [RECOMPUTE, kind, DEVICE]
    assert result.ok
    shared = result.rows[1]
    read = _read_if_worth(shared)
    assert (shared.tokens.shared, shared.tokens.device, shared.served) == (read, 0, read)
    assert (shared.tokens.host, shared.tokens.disk) == (0, 0)
    assert set(result.speedups()) == {1}
    assert list((tmp_path / "work").iterdir()) == []


def _read_if_worth(row: Row) -> int:
    """How many tokens were read: all that there were, or less for a reason that is given.

    Blocks of 128 tokens: 4 of 600 / 128 are whole, of two sessions. A model this small computes
    them in a tenth of a second, so that reading may not be worth it once it has been measured.
    """
    read = row.tokens.disk + row.tokens.shared
    assert row.tokens.computed == 1200 - read
    if not row.missed:
        assert read == 1024
    else:
        assert set(row.missed) == {Reason.NOT_WORTH}
        # Behind the first chunk that is not worth it nothing is asked for.
        assert 0 < read <= 1024 - row.missed[Reason.NOT_WORTH]
    return read


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = ServerConfig(
        model=tiny_model,
        kv_cache_gib=1,
        max_model_len=1024,
        log_path=tmp_path / "log",
        extra_args=("--no-such-argument",),
    )
    with pytest.raises(ServerError, match="no-such-argument"), Server(config):
        pytest.fail("it started")


def test_sigterm_to_the_demo_stops_its_engine(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from stepwell.bench.demo import *; "
        "run_demo(DemoOptions(model=sys.argv[1], path=sys.argv[2], prompt_tokens=600))"
    )
    demo = subprocess.Popen([sys.executable, "-c", code, str(tiny_model), str(tmp_path)])
    try:
        engine = _wait_for_child(demo.pid)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.wait()
    assert procs.group_pids(engine) == []
    assert list(tmp_path.iterdir()) == []


def _wait_for_child(pid: int, timeout_s: float = 60.0) -> int:
    """Returns a child of `pid` that leads a process group of its own."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            if os.getpgid(child) == child:
                return child
        time.sleep(0.1)
    raise AssertionError("the demo started no engine")
