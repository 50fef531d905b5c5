"""The command line as a user meets it: output, exit status, and one clear line for bad input."""

import fcntl
import importlib.util
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import types
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from ops import stores
from ops.stores import SLOT_BYTES, identity, keys_of, write_store

import stepwell
from stepwell import cli
from stepwell.clock import ManualClock
from stepwell.ops import shm
from stepwell.settings import Settings

HOLD = """
import sys
from pathlib import Path
from ops.stores import open_store
store = open_store(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with three records; /dev/shm of the machine is left out of the picture."""
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    write_store(tmp_path / "kv")
    return tmp_path / "kv"


@pytest.fixture
def owner(store: Path) -> Iterator[int]:
    """Another process that has the store open, by its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"open\n"
        yield process.pid
        process.stdin.close()
        assert process.wait(30) == 0


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "stepwell", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def damage(path: Path, name: str = "a flipped bit in the payload") -> None:
    stores.damage(path, keys_of(identity().root)[0], name)


# inspect


def test_inspect(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(store)]) == 0
    out, err = capsys.readouterr()
    assert f"root {identity().root.hex()}" in out
    assert "3 chunks of 1 root" in out
    assert err == ""


def test_inspect_two_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    path, clock = tmp_path / "kv", ManualClock()
    write_store(path, clock=clock)
    clock.advance(60)
    write_store(path, identity(tp=2, weights="xxh3-128:full:aa"), clock=clock)
    assert cli.main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "    - tp 1 here, 2 there\n    - weights differ" in out
    assert cli.main(["inspect", str(path), "--json"]) == 0
    recent, old = json.loads(capsys.readouterr().out)["roots"]
    assert recent["differences"] == []
    assert old["compared_with"] == recent["root"]
    assert old["differences"][0] == {
        "field": "tp", "here": 1, "there": 2, "words": "tp 1 here, 2 there",
    }  # fmt: skip


def test_inspect_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(store)
    assert cli.main(["check", str(store), "--fix"]) == 1
    capsys.readouterr()
    (store.parent / "vllm_offload_x.mmap").write_bytes(b"x")
    assert cli.main(["inspect", str(store), "--json", "--rated-dwpd", "2.5"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "path", "format", "owner", "journal", "chunks", "bytes", "free_bytes", "total_bytes",
        "allocated_bytes", "slots", "roots", "quarantine", "wear", "live", "partial",
        "abandoned_shared_memory",
    }  # fmt: skip
    assert set(report["roots"][0]) == {
        "root", "model", "fields", "labels", "chunks", "bytes", "oldest_age_s", "newest_age_s",
        "compared_with", "differences",
    }  # fmt: skip
    assert report["path"] == str(store)
    assert report["owner"] is None
    assert report["journal"]["state"] == "used"
    assert report["chunks"] == 2
    assert report["bytes"] == 2 * SLOT_BYTES
    assert report["roots"][0]["root"] == identity().root.hex()
    assert report["roots"][0]["fields"] == dict(identity().fields)
    (slots,) = report["slots"]
    assert slots["slots"] == slots["used"] + slots["free"] + slots["set_aside"]
    assert (slots["slot_bytes"], slots["used"], slots["set_aside"]) == (SLOT_BYTES, 2, 1)
    assert report["quarantine"] == [{"reason": "checksum", "slots": 1, "bytes": SLOT_BYTES}]
    assert set(report["wear"]) == {
        "written_bytes", "as_of_age_s", "observed_s", "bytes_per_day", "rated_drive_writes_per_day",
        "rated_bytes", "used_share", "drive_writes_per_day", "years", "observation",
    }  # fmt: skip
    assert report["wear"]["written_bytes"] > 3 * SLOT_BYTES
    assert report["wear"]["rated_drive_writes_per_day"] == 2.5
    assert report["wear"]["observation"] == "too_short"
    assert report["partial"] == {"files": 0, "bytes": 0}
    (left,) = report["abandoned_shared_memory"]
    assert left["path"].endswith("vllm_offload_x.mmap")


def test_inspect_without_a_journal(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "journal").write_bytes(b"what is this")
    assert cli.main(["inspect", str(store)]) == 0
    out = capsys.readouterr().out
    assert "The journal cannot be used (too short" in out
    assert "3 chunks of 1 root" in out


def test_owner_is_shown_and_check_works_beside_it(
    store: Path, owner: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(store)]) == 0
    assert f"process {owner} uses it" in capsys.readouterr().out
    assert cli.main(["inspect", str(store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["owner"] == {"pid": owner}
    assert cli.main(["check", str(store)]) == 0
    assert f"Process {owner} uses the store" in capsys.readouterr().out
    assert cli.main(["check", str(store), "--fix"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("stepwell: error: an engine uses this store")
    assert f"pid={owner}" in err


# check


def test_check_of_a_good_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(store)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{store}: read 3 records of 1 root, 36.0 KiB; all are good\n"
    assert err == ""


def test_check_finds_fixes_and_is_content(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(store)
    damage(store, "a file among the extents")
    assert cli.main(["check", str(store)]) == 1
    out = capsys.readouterr().out
    assert "checksum: 1 (the payload is not what was written)" in out
    assert f"extents/00000000-{SLOT_BYTES}.kv, slot 0 (from byte 0 on)" in out
    assert "Nothing was changed.\n--fix sets bad records aside: " in out
    assert f"moves what is not the store's to {store}/strays." in out
    assert cli.main(["check", str(store), "--fix"]) == 1
    out = capsys.readouterr().out
    assert "\n1 set aside: served no more" in out
    assert f"\n1 moved to {store}/strays." in out
    assert "could not" not in out
    assert cli.main(["check", str(store)]) == 0
    out = capsys.readouterr().out
    assert "Set aside earlier, not read: 1 slot." in out
    assert f"Moved to {store}/strays earlier, and counted by nobody: 1 file, 0 B" in out


@pytest.mark.parametrize("fix", [False, True])
def test_check_json(store: Path, fix: bool, capsys: pytest.CaptureFixture[str]) -> None:
    damage(store)
    damage(store, "a file among the extents")
    assert cli.main(["check", str(store), "--json", *(["--fix"] if fix else [])]) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "path", "ok", "fix", "owner", "journal", "roots", "records", "bytes", "expired", "gone",
        "stale", "set_aside_before", "bad", "bad_by_reason", "undescribed_roots", "leftovers",
        "strays",
    }  # fmt: skip
    assert report["ok"] is False
    assert report["fix"] is fix
    assert report["records"] == 3
    assert report["bad_by_reason"] == {"checksum": 1, "stray": 1}
    stray, wrong = report["bad"]
    assert set(wrong) == {"path", "slot", "reason", "detail", "bytes", "remedy", "fixed"}
    assert (wrong["slot"], wrong["remedy"], wrong["fixed"]) == (0, "set_aside", fix)
    assert (stray["slot"], stray["remedy"], stray["fixed"]) == (None, "move", fix)
    assert os.path.exists(wrong["path"])
    assert os.path.exists(stray["path"]) is not fix


def test_a_long_list_is_cut_in_text_and_whole_in_json(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in write_store(store, count=60):
        stores.damage(store, key, "a flipped bit in the payload")
    assert cli.main(["check", str(store)]) == 1
    assert "... and 10 more; --json lists all" in capsys.readouterr().out
    assert cli.main(["check", str(store), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["bad"]) == 60


def test_the_same_forms_of_path_as_in_the_settings(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.parent)
    for form in (str(store), f"file://{store}", "kv", "./kv/", f"{store}/../kv"):
        assert cli.main(["check", form]) == 0


# vllm-args


def test_vllm_args_is_one_shell_word(tmp_path: Path) -> None:
    path = str(tmp_path / """it's a "path" $HOME `x` \\ * é""")
    quoted = run("vllm-args", "--path", path, "--capacity", "20GiB")
    assert quoted.returncode == 0
    assert quoted.stdout.count("\n") == 1
    assert quoted.stdout.startswith("'{")
    arguments = f"{sys.executable} -m stepwell vllm-args --capacity 20GiB --json --path"
    for script in (
        f"printf %s {quoted.stdout}",
        f'printf %s "$({arguments} "$1")"',
    ):
        done = subprocess.run(
            ["sh", "-c", script, "sh", path], capture_output=True, text=True, check=True
        )
        config = json.loads(done.stdout)
        assert config["kv_connector_extra_config"]["secondary_tiers"][0]["path"] == path


def test_vllm_args_say_what_they_should(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["vllm-args", "--path", "/mnt/kv", "--capacity", "20GiB", "--json"]
    assert cli.main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["kv_load_failure_policy"] == "recompute"
    extra = plain["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["cpu_bytes_to_use"] == 4 << 30
    more = ["--cpu", "--primary", "1GiB", "--set", "io_threads=16", "--set", "min_free=2GiB",
            "--set", "weights_id=2024", "--set", "read_deadline=500ms"]  # fmt: skip
    assert cli.main([*arguments, *more]) == 0
    extra = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]
    assert extra["spec_module_path"] == "stepwell.engines.vllm_cpu"
    assert extra["cpu_bytes_to_use"] == 1 << 30
    (tier,) = extra["secondary_tiers"]
    del tier["type"], tier["module_path"]
    settings = Settings.parse(tier)
    assert (settings.io_threads, settings.min_free_bytes) == (16, 2 << 30)
    assert (settings.weights_id, settings.read_deadline_s) == ("2024", 0.5)


# demo


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The demo, which would take minutes, replaced by a record of what it was asked for."""
    from stepwell.bench import demo as real
    from stepwell.bench import report

    seen = types.SimpleNamespace(options=None, ok=True, DemoOptions=real.DemoOptions)

    def run_demo(options: object) -> object:
        seen.options = options
        return seen

    monkeypatch.setattr(real, "run_demo", run_demo)
    monkeypatch.setattr(report, "to_text", lambda result: "a table")
    monkeypatch.setattr(report, "to_json", lambda result: {"rows": []})
    return seen


def test_demo_maps_its_flags(
    demo: types.SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo"]) == 0
    assert demo.options == demo.DemoOptions()
    assert capsys.readouterr().out == "a table\n"
    assert cli.main([
        "demo", "--model", "gemma", "--path", str(tmp_path), "--sessions", "2",
        "--concurrency", "1,2,8", "--prompt-tokens", "100", "--max-tokens", "5", "--compare-fs",
        "--capacity", "1GiB", "--keep", "--json",
    ]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {"rows": []}
    assert demo.options == demo.DemoOptions(
        model="gemma", path=str(tmp_path), sessions=2, concurrencies=(1, 2, 8), prompt_tokens=100,
        max_tokens=5, compare_fs=True, capacity="1GiB", keep=True,
    )  # fmt: skip


def test_demo_help_gives_the_real_defaults(
    demo: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    default = demo.DemoOptions()
    concurrencies = ",".join(map(str, default.concurrencies))
    for value in (default.sessions, concurrencies, default.prompt_tokens, default.max_tokens,
                  default.capacity):  # fmt: skip
        assert f"(default {value})" in text


def test_demo_that_found_something_wrong(demo: types.SimpleNamespace) -> None:
    demo.ok = False
    assert cli.main(["demo"]) == 1


def test_demo_interrupted_before_it_made_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepwell.bench import demo as real
    from stepwell.bench import machine

    def interrupted() -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "vllm_version", lambda: "1")
    monkeypatch.setattr(real, "make_model", interrupted)
    command = ["demo", "--path", str(tmp_path), "--capacity", "1MiB"]
    assert cli.main(command) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "stepwell: interrupted\n")


def test_demo_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepwell.bench import machine

    monkeypatch.setattr(machine, "vllm_version", lambda: None)
    assert cli.main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "make demo" in err
    assert err.count("\n") == 1


# bench storage; what it measures is tested in tests/bench


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The benchmark replaced by a record of what it was asked for."""
    from stepwell.bench import storage as real
    from stepwell.bench import storage_options, storage_report

    seen = types.SimpleNamespace(options=None, StorageOptions=storage_options.StorageOptions)

    def run_storage(options: object) -> object:
        seen.options = options
        return seen

    monkeypatch.setattr(real, "run_storage", run_storage)
    monkeypatch.setattr(storage_report, "storage_text", lambda result: "a table")
    monkeypatch.setattr(storage_report, "storage_json", lambda result: {"rows": []})
    return seen


def test_bench_storage_maps_its_flags(
    storage: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "storage"]) == 0
    assert storage.options == storage.StorageOptions()
    assert capsys.readouterr().out == "a table\n"
    assert cli.main([
        "bench", "storage", "--path", "/a", "--path", "/b", "--chunk", "1MiB", "--chunk", "4MiB",
        "--jobs", "3", "--chunks-per-job", "2", "--size", "1GiB", "--rounds", "5", "--threads",
        "6", "--json",
    ]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {"rows": []}
    assert storage.options == storage.StorageOptions(
        paths=("/a", "/b"), chunks=("1MiB", "4MiB"), jobs=3, chunks_per_job=2, size="1GiB",
        rounds=5, threads=6,
    )  # fmt: skip


def test_bench_storage_help_gives_the_real_defaults(
    storage: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "storage", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    default = storage.StorageOptions()
    chunks = " and ".join(default.chunks)
    for value in (default.jobs, default.threads, chunks):
        assert f"(default {value})" in text
    assert f"(default {default.rounds})" in text
    for paths, words in (((), "4GiB"), (("redis://h",), "512MiB")):
        size = storage.StorageOptions(paths=paths).size_bytes
        assert f"{size >> 20}MiB" == {"4GiB": "4096MiB"}.get(words, words)
        assert words in text
    assert "default: the current directory" in text


# All of them


VLLM_ARGS = ["vllm-args", "--path", "/mnt/kv", "--capacity", "20GiB"]
STORAGE = ["bench", "storage"]
BAD_INPUT = {
    "unknown command": (["chekc"], "invalid choice: 'chekc'"),
    "no path": (["inspect"], "required: PATH"),
    "unknown option": (["check", "/kv", "--fixx"], "unrecognized arguments: --fixx"),
    "abbreviated option": (["check", "/kv", "--fi"], "unrecognized arguments: --fi"),
    "missing directory": (["inspect", "{tmp}/none"], "a store: path={tmp}/none"),
    "missing directory, check": (["check", "{tmp}/none"], "a store: path={tmp}/none"),
    "missing directory, fix": (["check", "--fix", "{tmp}/none"], "does not exist"),
    "a file": (["inspect", "{tmp}/file"], "path is a file"),
    "a file, check": (["check", "{tmp}/file"], "path is a file"),
    "below a file": (["check", "{tmp}/file/kv"], "does not exist"),
    "not a store": (["check", "{tmp}"], "no Stepwell store here"),
    "not a store, fix": (["check", "{tmp}", "--fix"], "no Stepwell store here"),
    "another format": (["inspect", "{tmp}/v9"], "format=9 known_format=2"),
    "another format, fix": (["check", "--fix", "{tmp}/v9"], "format=9 known_format=2"),
    "an earlier format": (["inspect", "{tmp}/v1"], "give another path, or remove it"),
    "an earlier format, fix": (["check", "--fix", "{tmp}/v1"], "by an earlier version of Stepwell"),
    "no rating": (["inspect", "/kv", "--rated-dwpd", "x"], "invalid float value: 'x'"),
    "rating out of range": (["inspect", "/kv", "--rated-dwpd", "0"], "above 0: rated_dwpd=0"),
    "damaged marker": (["inspect", "{tmp}/odd"], "stepwell.json is damaged"),
    "empty path": (["inspect", ""], "absolute directory"),
    "two slashes": (["inspect", "file://mnt/kv"], "file:///mnt/kv"),
    "another scheme": (["check", "s3://bucket/kv"], "stores on drives"),
    "no kind of storage": (["inspect", "nfs://host/kv"], 'no kind of storage "nfs"'),
    "NUL in a path": (["inspect", "a\0b"], "no NUL byte"),
    "no capacity": (["vllm-args", "--path", "/kv"], 'the setting "capacity" is missing'),
    "capacity without a unit": (
        ["vllm-args", "--path", "/kv", "--capacity", "20"], "capacity needs a unit",
    ),
    "negative capacity": (
        ["vllm-args", "--path", "/kv", "--capacity=-1GiB"], "must not be negative",
    ),
    "relative path": (
        ["vllm-args", "--path", "kv", "--capacity", "1GiB"], "path must be absolute",
    ),
    "a negative size": (
        ["vllm-args", "--path", "/kv", "--capacity", "-1GiB"], "must not be negative",
    ),
    "a negative primary": ([*VLLM_ARGS, "--primary", "-.5GiB"], "primary is a size such as"),
    "a negative size, demo": (["demo", "--capacity", "-1GiB"], "must not be negative"),
    "a path in another": ([*VLLM_ARGS, "--path", "/mnt/kv/b"], "a path lies in another one"),
    "a path in another, first": ([*VLLM_ARGS, "--path", "/mnt"], "a path lies in another one"),
    "a path with two slashes": ([*VLLM_ARGS, "--path", "//mnt/kv"], "a path is given twice"),
    "a path in the root": ([*VLLM_ARGS, "--path", "/"], "a path lies in another one"),
    "the root": (["vllm-args", "--path", "/", "--capacity", "1GiB"], "root of the file system"),
    "the root, twice as long": (
        ["vllm-args", "--path", "//", "--capacity", "1GiB"], "root of the file system",
    ),
    "no weights_id": ([*VLLM_ARGS, "--set", "weights_id="], "leave it out"),
    "a blank weights_id": ([*VLLM_ARGS, "--set", "weights_id= "], "leave it out"),
    "primary as a setting": ([*VLLM_ARGS, "--set", "primary=1GiB"], "give --primary instead"),
    "vLLM's primary as a setting": (
        [*VLLM_ARGS, "--set", "cpu_bytes_to_use=1"], "give --primary instead",
    ),
    "primary 0": ([*VLLM_ARGS, "--primary", "0"], 'write "20GiB"'),
    "a home directory": (["check", "~/no/kv"], "~ is not expanded here"),
    "an unknown argument": (["check", "/kv", "--fixx"], "--fixx (see stepwell check --help)"),
    "an unknown argument of a benchmark": (
        [*STORAGE, "--fast"], "--fast (see stepwell bench storage --help)",
    ),
    "an unknown argument before the command": (["--x", "check", "/kv"], "(see stepwell --help)"),
    "metrics in the store": (
        [*VLLM_ARGS, "--set", "metrics=/mnt/kv/journal"], "metrics lies in the store",
    ),
    "paths as a setting": ([*VLLM_ARGS, "--set", "paths=/x"], "give --path, once for each drive"),
    "a far-off setting": ([*VLLM_ARGS, "--set", "foo=4"], "no setting 'foo': known=path,"),
    "unknown setting": ([*VLLM_ARGS, "--set", "io_thread=4"], 'the nearest is "io_threads"'),
    "setting without a value": ([*VLLM_ARGS, "--set", "io_threads"], "name=value"),
    "setting with a bad value": ([*VLLM_ARGS, "--set", "io_threads=many"], "whole number"),
    "setting out of range": ([*VLLM_ARGS, "--set", "io_threads=0"], "io_threads is 1 to 256"),
    "setting without a unit": ([*VLLM_ARGS, "--set", "min_free=10"], "needs a unit"),
    "setting given twice": (
        [*VLLM_ARGS, "--set", "min_free=1GiB", "--set", "min_free=2GiB"], "set twice",
    ),
    "path as a setting": ([*VLLM_ARGS, "--set", "path=/x"], "give --path instead"),
    "small primary": ([*VLLM_ARGS, "--primary", "1KiB"], "primary is at least 1MiB"),
    "demo: concurrency": (["demo", "--concurrency", "1,x"], 'such as "1,4"'),
    "demo: concurrency 0": (["demo", "--concurrency", "0"], "concurrencies must be"),
    "demo: sessions": (["demo", "--sessions", "0"], "sessions must be at least 1"),
    "demo: path": (["demo", "--path", "{tmp}/none"], "does not exist"),
    "demo: a file": (["demo", "--path", "{tmp}/file"], "no directory: path={tmp}/file"),
    "demo: small capacity": (["demo", "--capacity", "1KiB"], "capacity is at least 1MiB"),
    "demo: large capacity": (["demo", "--capacity", "7000000TiB"], "larger than the file system"),
    "demo: model": (["demo", "--model", "{tmp}/none"], "does not exist"),
    "demo: capacity": (["demo", "--capacity", "20"], "capacity needs a unit"),
    "bench without a benchmark": (["bench"], "required: BENCHMARK"),
    "unknown benchmark": (["bench", "tape"], "invalid choice: 'tape'"),
    "storage: missing path": ([*STORAGE, "--path", "{tmp}/none"], "path={tmp}/none"),
    "storage: a file": ([*STORAGE, "--path", "{tmp}/file"], "no directory: path={tmp}/file"),
    "storage: a path twice": (
        [*STORAGE, "--path", "{tmp}", "--path", "{tmp}/v9/.."], "path={tmp},{tmp}",
    ),
    "index: a file": (["bench", "index", "--path", "{tmp}/file"], "no directory: path={tmp}/file"),
    "storage: relative path": ([*STORAGE, "--path", "kv"], "path must be absolute"),
    "storage: no room": (
        [*STORAGE, "--path", "{tmp}", "--size", "1000TiB"], "about 3 times size",
    ),
    "storage: small size": (
        [*STORAGE, "--path", "{tmp}", "--size", "31MiB"], "size is at least jobs x chunk",
    ),
    "storage: size without a unit": ([*STORAGE, "--size", "4"], "size needs a unit"),
    "storage: odd chunk": ([*STORAGE, "--chunk", "5000B"], "multiple of 4096"),
    "storage: chunk twice": (
        [*STORAGE, "--chunk", "2MiB", "--chunk", "2048KiB"], "must be distinct",
    ),
    "storage: jobs": ([*STORAGE, "--jobs", "0"], "jobs must be at least 1"),
    "storage: rounds": ([*STORAGE, "--rounds", "0"], "rounds must be at least 1"),
    "storage: threads": ([*STORAGE, "--threads", "0"], "threads must be at least 1"),
    "storage: not a number": ([*STORAGE, "--rounds", "x"], "invalid int value: 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_clear_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name, text in (("v1", '{"format": 1}'), ("v9", '{"format": 9}'), ("odd", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stepwell.json").write_text(text)
    arguments, expected = BAD_INPUT[case]
    before = sorted(tmp_path.rglob("*"))
    assert cli.main([each.replace("{tmp}", str(tmp_path)) for each in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stepwell: error: ")
    assert err.count("\n") == 1
    assert expected.replace("{tmp}", str(tmp_path)) in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["demo", "vllm-args", "inspect", "check", "bench storage"])
def test_help_explains_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"stepwell {command} " in text.partition("example")[2]


def test_help_of_vllm_args_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vllm-args", "--help"]) == 0
    text = capsys.readouterr().out
    known = set(Settings.keys()) - {"paths"}  # which is --path, given several times
    assert [name for name in known if name not in text] == []
    assert "paths" not in text, "--set refuses it"


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "inspect" in err


def test_version_and_a_fast_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c",
         "import sys; from stepwell.cli import main; status = main(['--version'])\n"
         "print(status, sorted({'numpy', 'tqdm', 'xxhash', 'torch', 'vllm', 'asyncio'}"
         " & set(sys.modules)))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"stepwell {stepwell.__version__}\n0 []\n"
    assert run("--version").stdout == f"stepwell {stepwell.__version__}\n"


def test_commands_load_no_engine(store: Path) -> None:
    script = (
        "import sys; from stepwell.cli import main\n"
        f"main(['check', {str(store)!r}]); main(['inspect', {str(store)!r}])\n"
        f"main({VLLM_ARGS!r})\n"
        "print(sorted({'torch', 'vllm', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\n[]\n")


SLOW_CHECK = """
import sys, time
from stepwell import cli
from stepwell.ops import check
seconds = float(sys.argv[1])
really_check = check.check_store

def slowly(path, *, on_start, on_record, **options):
    def record(size_bytes):
        time.sleep(seconds / 3)
        on_record(size_bytes)
    return really_check(path, on_start=on_start, on_record=record, **options)

check.check_store = slowly
sys.exit(cli.main(["check", sys.argv[2]]))
"""


@pytest.mark.parametrize(("seconds", "terminal", "shown"), [
    (3.3, True, True), (0.0, True, False), (3.3, False, False),
])  # fmt: skip
def test_progress_is_for_terminals_and_long_checks(
    store: Path, seconds: float, terminal: bool, shown: bool
) -> None:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = subprocess.run(
        [sys.executable, "-c", SLOW_CHECK, str(seconds), store],
        stdout=subprocess.PIPE, stderr=theirs, text=True, check=False, timeout=60,
    )  # fmt: skip
    os.set_blocking(ours, False)
    try:
        err = os.read(ours, 65536)
    except BlockingIOError:
        err = b""
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert "all are good" in done.stdout
    assert (b"checking" in err) is shown
    assert shown or err == b""


def test_interrupt(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepwell.ops import check

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check_store", interrupted)
    assert cli.main(["check", str(store)]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away(store: Path, unbuffered: str) -> None:
    for arguments in (["inspect", store, "--json"], ["check", store], ["--help"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run(
            [sys.executable, "-m", "stepwell", *map(str, arguments)],
            stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
        os.close(write_end)
        assert done.stderr == ""
        # argparse of some versions of Python looks away when it cannot print its help.
        assert done.returncode in (128 + signal.SIGPIPE, *([0] if arguments == ["--help"] else []))


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff" + uuid.uuid4().hex.encode())
    write_store(tmp_path / name)
    for arguments in (["inspect"], ["inspect", "--json"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "stepwell", *arguments, os.fsencode(tmp_path / name)],
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"\xff" in done.stdout or rb"\udcff" in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_for_the_output(store: Path, unbuffered: str) -> None:
    """Buffered output failed only at the interpreter's end, with status 120 and a traceback."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stepwell", "check", store],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "stepwell: error: No space left on device\n"


def test_a_second_url_is_not_lost_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*VLLM_ARGS, "--url", "redis://a", "--url", "redis://b"]) == 2
    assert "--url may be given once" in capsys.readouterr().err


def test_what_cannot_be_checked_here_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "redis" else find(name)
    )
    assert cli.main([*VLLM_ARGS, "--url", "redis://a?clustr=true"]) == 0
    assert "pip install 'stepwell[redis]'" in capsys.readouterr().err
