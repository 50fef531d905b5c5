"""`stepwell bench index` on a small store: the figures are of what it says, and nothing is left."""

import json
from pathlib import Path

import pytest

from stepwell.bench.index import IndexOptions, IndexResult, Restart, run_index
from stepwell.bench.index_report import index_json, index_text
from stepwell.cli import main
from stepwell.errors import ConfigError


def test_a_small_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "index", "--path", str(tmp_path), "--chunks", "600", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_chunks"] == 600
    assert found["chunk_bytes"] == 4096
    assert found["journal_bytes"] >= 600 * 32
    for start in (found["journal"], found["scan"]):
        assert 0 < start["open_s"] <= start["first_hit_s"]
        assert start["keys_per_s"] > 0
        assert start["lookup_syscalls"] == 0, "a lookup does no I/O"
    assert len(found["promises"]) == 3
    assert list(tmp_path.iterdir()) == []


def test_without_the_scan(tmp_path: Path) -> None:
    result = run_index(IndexOptions(str(tmp_path), 100, "1KiB", scan=False))
    assert result.scan is None
    assert "without the journal" not in index_text(result)


def result_of(restart: Restart, num_chunks: int = 100_000) -> IndexResult:
    configuration: dict[str, object] = {
        "stepwell": "0", "python": "3", "numpy": "2", "xxhash": "4", "kernel": "Linux", "cpus": 2,
        "cpu": "x", "path": {"path": "/p", "file_system": "ext4", "device": "d", "drive": "v"},
    }  # fmt: skip
    return IndexResult(num_chunks, 4096, 1.0, 1, restart, restart, configuration)


@pytest.mark.parametrize(
    ("restart", "num_chunks", "met"),
    [
        (Restart(0.5, 1.0, 200 * 100_000, 500_000.0, 0), 100_000, [True, True, True]),
        (Restart(0.5, 1.1, 201 * 100_000, 499_999.0, 0), 100_000, [False, False, False]),
        (Restart(0.5, 1.0, 999 * 99_999, 500_000.0, 0), 99_999, [None, True, True]),
        (Restart(0.5, 8.0, 200 * 1_000_000, 500_000.0, 0), 1_000_000, [True, True, True]),
        (Restart(0.5, 8.1, 200 * 1_000_000, 500_000.0, 1), 1_000_000, [True, False, False]),
    ],
)
def test_promises(restart: Restart, num_chunks: int, met: list[bool | None]) -> None:
    result = result_of(restart, num_chunks)
    promises = index_json(result)["promises"]
    assert isinstance(promises, list)
    assert [each["met"] for each in promises] == met
    assert index_text(result).count("NOT MET") == met.count(False)
    assert index_text(result).count("not measured") == met.count(None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (IndexOptions("relative"), "absolute"),
        (IndexOptions("/nowhere/at/all"), "does not exist"),
        (IndexOptions("{tmp}", 0), "chunks is 1 to"),
        (IndexOptions("{tmp}", 10, "0B"), "chunk is at most"),
        (IndexOptions("{tmp}", 10, "4"), 'needs a unit: write "4KiB"'),
        (IndexOptions("{tmp}", 100_000_000, "1GiB"), "no room"),
    ],
)
def test_bad_input(tmp_path: Path, options: IndexOptions, words: str) -> None:
    path = options.path.replace("{tmp}", str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        run_index(IndexOptions(path, options.num_chunks, options.chunk))
    assert list(tmp_path.iterdir()) == []
