"""Settings: what is read, what is refused, and in which words."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.settings import Settings, format_bytes, parse_duration, parse_path, parse_size

GOOD = {"path": "/mnt/kv", "capacity": "20GiB"}


def refusal(texts: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.parse(texts)
    return str(caught.value)


def test_defaults() -> None:
    settings = Settings.parse(GOOD)
    assert settings == Settings((Path("/mnt/kv"),), 20 << 30)
    assert settings.min_free_bytes == 1 << 30
    assert settings.host_capacity_bytes == 0
    assert settings.io_threads == 8
    assert settings.inflight_writes_bytes == 4 << 30
    assert settings.read_deadline_s == 10.0
    assert settings.write_deadline_s == 30.0
    assert settings.eviction == "leaf-first-lru"
    assert settings.admission == "always"
    assert settings.drive_writes_per_day == 0
    assert settings.ttl_s == 0
    assert settings.write_mode == "through"
    assert settings.promotion == "always"
    assert settings.read_when == "faster"
    assert settings.min_read_tokens == 0
    assert settings.slow_after_s == 2.0
    assert settings.metrics == ""
    assert settings.weights_id == ""
    assert settings.if_incompatible == "refuse"


def test_every_setting_is_read() -> None:
    texts = {
        "paths": ["file:///mnt/a", "/mnt/b"],
        "capacity": "1.5TB",
        "url": "redis://127.0.0.1",
        "min_free": "0B",
        "host_capacity": "4GiB",
        "io_threads": 32,
        "inflight_writes": "256MiB",
        "read_deadline": "500ms",
        "write_deadline": "2min",
        "eviction": "s3-fifo",
        "admission": "second-demotion",
        "drive_writes_per_day": 0.5,
        "ttl": "7d",
        "write_mode": "back",
        "promotion": "never",
        "read_when": "always",
        "min_read_tokens": 512,
        "slow_after": "3s",
        "metrics": "127.0.0.1:9477",
        "weights_id": "v7",
        "if_incompatible": "start_without",
    }
    assert {"path", *texts} == set(Settings.keys())
    assert Settings.parse(texts) == Settings(
        (Path("/mnt/a"), Path("/mnt/b")), 1_500_000_000_000, "redis://127.0.0.1",
        0, 4 << 30, 32, 256 << 20, 0.5, 120.0,
        "s3-fifo", "second-demotion", 0.5, 7 * 86400.0, "back", "never", "always",
        512, 3.0,
        "127.0.0.1:9477", "v7", "start_without",
    )  # fmt: skip
    assert Settings.parse(GOOD).paths == (Path("/mnt/kv"),)


def test_there_are_few_settings() -> None:
    assert len(Settings.keys()) <= 40
    # "path" and "paths" are one field.
    assert len(set(Settings.keys())) == len(dataclasses.fields(Settings)) + 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0B", 0), ("1B", 1), ("4096B", 4096), ("1KiB", 1024), ("1KB", 1000), ("1MiB", 1 << 20),
        ("20GiB", 20 << 30), ("1.5GiB", 3 << 29), ("1.5 TB", 1_500_000_000_000), ("2TiB", 2 << 40),
        (" 7 gib ", 7 << 30), ("1mb", 1_000_000), ("+3GB", 3_000_000_000), ("0.5KiB", 512),
        ("8388607TiB", 8388607 << 40),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "capacity") == size


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (20, 'needs a unit: write "20GiB"'),
        (2.5, 'write "2.5GiB"'),
        (21474836480, 'write "21474836480B"'),
        (0, 'write "20GiB"'),
        (-7, 'write "20GiB"'),
        ("20", 'write "20GiB"'),
        ("20.5", 'write "20.5GiB"'),
        ("0", 'write "20GiB"'),
        ("0.0001", 'write "20GiB"'),
        ("-5", 'write "20GiB"'),
        ("9" * 30, 'write "20GiB"'),
        ("200G", 'unknown unit; write "200GiB"'),
        ("1.5tI", 'write "1.5TiB"'),
        ("-2G", 'write "20GiB"'),
        ("-1GiB", "must not be negative"),
        ("-0.001B", "must not be negative"),
        ("1GiBs", "unknown unit"),
        ("1Gi", "unknown unit"),
        ("1PiB", "unknown unit"),
        ("1bit", "unknown unit"),
        ("", "is a size such as"),
        ("lots", "is a size such as"),
        ("GiB", "is a size such as"),
        ("1,5GiB", "is a size such as"),
        ("1e3GiB", "is a size such as"),
        ("0x10B", "is a size such as"),
        ("1_000B", "is a size such as"),
        ("nanGiB", "is a size such as"),
        ("١GiB", "is a size such as"),
        ("1GiB 1MiB", "is a size such as"),
        ("1GiB\nrm -rf /", "is a size such as"),
        (None, "is a size such as"),
        (True, "is a size such as"),
        (["1GiB"], "is a size such as"),
        (b"1GiB", "is a size such as"),
        ("8388608TiB", "larger than anything"),
        ("9" * 400 + "B", "larger than anything"),
        ("9" * 400 + "TiB", "larger than anything"),
    ],
)
@pytest.mark.parametrize("name", ["capacity", "min_free", "host_capacity", "inflight_writes"])
def test_what_is_no_size(name: str, value: object, words: str) -> None:
    message = refusal({**GOOD, name: value})
    assert words in message
    assert f"{name}={value!r}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("10s", 10.0),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("1.5 s", 1.5),
        ("24h", 86400),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text, "read_deadline") == seconds


@pytest.mark.parametrize(
    "value",
    ["10", 10, 0.5, "0s", "-1s", "0.0ms", "10 seconds", "1m", "2d", "", "soon", None, True, "infs",
     "25h", "9" * 400 + "s", "1s\n2s"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["read_deadline", "write_deadline"])
def test_what_is_no_time(name: str, value: object) -> None:
    message = refusal({**GOOD, name: value})
    assert f"{name}={value!r}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/mnt/kv", "/mnt/kv"),
        ("/mnt//kv/./x/..", "/mnt/kv"),
        ("file:///mnt/kv", "/mnt/kv"),
        ("FILE:///mnt/kv", "/mnt/kv"),
        ("file:///mnt/with%20space", "/mnt/with space"),
        ("/mnt/with space", "/mnt/with space"),
        ("/mnt/100%20", "/mnt/100%20"),
        ("/mnt/ümlaut", "/mnt/ümlaut"),
        ("/", "/"),
    ],
)
def test_paths(text: str, path: str) -> None:
    assert parse_path(text) == Path(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("kv", "must be absolute"),
        ("./kv", "must be absolute"),
        ("~/kv", "must be absolute, and ~ is not expanded here: write '/home/me/kv'"),
        ("kv\nkv", "must be absolute"),
        ("file:kv", "must be absolute"),
        ("fs:///p", "local directory"),
        ("fs://p", "local directory"),
        ("s3://bucket/p", "local directory"),
        ("://p", "local directory"),
        ("file://p", "write 'file:///p'"),
        ("file://host/p", "write 'file:///host/p'"),
        ("file://ho\nst/p", "names a host"),
        ("file://[p", "no valid URL"),
        ("file:///p?x=1", "no parameters"),
        ("file:///p#x", "no parameters"),
        ("file://", "must be absolute"),
        ("/p\0q", "no NUL"),
        ("file:///p%00q", "no NUL"),
        ("", "absolute directory"),
        (None, "absolute directory"),
        (7, "absolute directory"),
        (Path("/p"), "absolute directory"),
    ],
)
def test_what_is_no_path(value: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    message = refusal({**GOOD, "path": value})
    assert words in message
    assert f"path={value!r}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("capacity_bytes", "capacity"),
        ("Capacity", "capacity"),
        ("CAPACITY", "capacity"),
        ("primary", None),
        ("foo", None),
        ("capcity", "capacity"),
        ("min_free_bytes", "min_free"),
        ("minfree", "min_free"),
        ("threads", "io_threads"),
        ("n_io_threads", "io_threads"),
        ("root_dir", None),
        ("read_dead", "read_deadline"),
        ("weights", "weights_id"),
        ("x", None),
        ("", None),
        ("cap\nacity", "capacity"),
        (7, None),
    ],
)
def test_an_unknown_setting_names_its_neighbour(name: object, nearest: str | None) -> None:
    """And none where none is near: "primary" was told of "promotion"."""
    message = refusal({**GOOD, name: "1GiB"})  # type: ignore[dict-item]
    assert f"there is no setting {str(name)!r}" in message
    assert ("the nearest is" in message) is (nearest is not None)
    assert nearest is None or f'the nearest is "{nearest}"' in message
    assert f"known={','.join(Settings.keys())}" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["path", "capacity"])
def test_a_missing_setting_is_named(name: str) -> None:
    texts = {key: value for key, value in GOOD.items() if key != name}
    assert f'the setting "{name}" is missing' in refusal(texts)
    message = refusal({"weights_id": "x"} | texts)
    assert f'the setting "{name}" is missing' in message
    assert "given=weights_id," in message


def test_a_url_takes_the_place_of_a_path() -> None:
    assert Settings.parse({"url": "redis://host"}) == Settings(url="redis://host")
    both = Settings.parse({**GOOD, "url": "redis://host"})
    assert (both.paths, both.url) == ((Path("/mnt/kv"),), "redis://host")
    assert "capacity is of the disk tier" in refusal({"url": "redis://host", "capacity": "1GiB"})
    assert "url is a text" in refusal({"url": 7})
    assert 'the setting "path" is missing' in refusal({})
    assert "secret" not in repr(Settings(url="redis://:secret@host"))


def test_a_file_url_is_the_disk_tier() -> None:
    one = Settings.parse({"url": "file:///mnt/a", "capacity": "1GiB"})
    assert one == Settings((Path("/mnt/a"),), 1 << 30)
    three = {"url": "file:///mnt/a%20b?path=/mnt/c&path=/mnt/d%26e", "capacity": "1GiB"}
    assert Settings.parse(three).paths == (Path("/mnt/a b"), Path("/mnt/c"), Path("/mnt/d&e"))
    assert 'the setting "capacity" is missing' in refusal({"url": "file:///mnt/a"})
    assert "its path is given as well" in refusal({**GOOD, "url": "file:///mnt/a"})
    assert 'the parameter "path" and no other' in refusal(
        {"url": "file:///mnt/a?capacity=1GiB", "capacity": "1GiB"}
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": "0B"},
        {"capacity": "1023KiB"},
        {"inflight_writes": "0B"},
        {"inflight_writes": "1MB"},
        {"io_threads": 0},
        {"io_threads": -1},
        {"io_threads": 257},
        {"io_threads": "8"},
        {"io_threads": 8.0},
        {"io_threads": True},
        {"io_threads": None},
        {"if_incompatible": "ignore"},
        {"if_incompatible": ""},
        {"if_incompatible": True},
        {"weights_id": 7},
        {"weights_id": None},
    ],
)
def test_what_is_out_of_range(wrong: dict[str, object]) -> None:
    message = refusal({**GOOD, **wrong})
    (name,) = wrong
    assert f"{name}=" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "metrics", ["/mnt/a/kv/journal", "/mnt/b", "/mnt/b/x/y.prom", "//mnt/b/m", "/mnt/c/../b/m"]
)
def test_metrics_overwrite_nothing_of_the_store(metrics: str) -> None:
    """A file named "journal" in the store took the place of the journal every five seconds."""
    paths = {"paths": ["/mnt/a/kv", "/mnt/b"], "capacity": "1GiB"}
    message = refusal({**paths, "metrics": metrics})
    assert "metrics lies in the store" in message
    assert f"path={'/mnt/a/kv' if 'journal' in metrics else '/mnt/b'}" in message
    for good in ("/mnt/a/m.prom", "/mnt/bb", "/mnt", "localhost:1"):
        Settings.parse({**paths, "metrics": good})


@given(st.dictionaries(st.sampled_from([*Settings.keys(), "other"]),
                       st.text() | st.integers() | st.floats() | st.none()))  # fmt: skip
def test_whatever_a_person_writes_it_is_read_or_refused_in_one_line(texts: dict) -> None:
    """No other exception, however odd the texts are."""
    refusals = []
    try:
        settings = Settings.parse({**GOOD, **texts})
    except ConfigError as error:
        refusals.append(str(error))
    else:
        assert all(path.is_absolute() for path in settings.paths)
        assert settings.capacity_bytes >= 1 << 20
    assert all(len(text.splitlines()) == 1 and "=" in text for text in refusals)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5.0 TiB"),
     (5 << 50, "5120.0 TiB")],
)  # fmt: skip
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
