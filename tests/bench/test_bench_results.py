"""The demo's arithmetic and its report: percentiles, token accounting, JSON, text."""

import json

import pytest

from stepwell.bench.load import Answer, LoadResult
from stepwell.bench.prometheus import parse_metrics
from stepwell.bench.report import format_table, to_json, to_text, verdict
from stepwell.bench.results import (
    DEVICE,
    DISK,
    RECOMPUTE,
    VLLM_FS,
    DemoResult,
    Row,
    TokenCounts,
    bytes_read,
    make_row,
    percentile,
    token_counts,
    tokens_missed,
    tokens_served,
)

CONFIGURATION = {
    "dtype": "float32",
    "output_tokens": 32,
    "kv_bytes_per_token": 24576,
    "threads": 1,
    "cpus": 2,
    "cpu": "a processor",
    "file_system": "ext4",
    "device": "/dev/disk",
    "stepwell": "0",
    "vllm": "0.32.0",
    "torch": "2",
    "python": "3.11",
}


def a_row(mode: str, ttft_s: float, *, concurrency: int = 1, **changes: object) -> Row:
    tokens = {
        RECOMPUTE: TokenCounts(computed=1200),
        DEVICE: TokenCounts(computed=176, device=1024),
    }.get(mode, TokenCounts(computed=176, disk=1024))
    values: dict[str, object] = {
        "mode": mode,
        "concurrency": concurrency,
        "ttft_s": (ttft_s, ttft_s),
        "output_tokens_per_s": 10.0,
        "tokens": tokens,
        "tokens_asked": 1200,
        "bytes_read": 0,
        "bytes_read_physical": 0,
        "answers_equal": True,
    }
    return Row(**{**values, **changes})  # type: ignore[arg-type]


def a_result(*rows: Row) -> DemoResult:
    return DemoResult(
        model="a model", prompt_tokens=600, sessions=2, rows=rows, configuration=CONFIGURATION
    )


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 50, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, percent)


def metrics_text(computed: int, device: int, disk: int, read: int) -> str:
    return (
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {computed}.0\n'
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="local_cache_hit"}} {device}.0\n'
        f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="device"}} {device}.0\n'
        f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="host"}} 0.0\n'
        f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="disk"}} {disk}.0\n'
        f'vllm:kv_offload_tiering_read_bytes_total{{engine="0",tier="x"}} {read}.0\n'
    )


def test_tokens_and_bytes_are_differences_of_two_readings() -> None:
    before = parse_metrics(metrics_text(100, 5, 7, 1000))
    after = parse_metrics(metrics_text(276, 5, 1031, 5000))
    counts = token_counts(before, after)
    assert counts == TokenCounts(computed=176, device=0, host=0, disk=1024)
    assert (counts.total, counts.reused) == (1200, 1024)
    assert bytes_read(before, after) == 4000


def test_stepwells_own_counter_goes_before_the_engines() -> None:
    own = 'vllm:stepwell_read_bytes_total{engine="0",tier="disk"} 300\n'
    before = parse_metrics(metrics_text(0, 0, 0, 0))
    after = parse_metrics(metrics_text(0, 0, 0, 5000) + own)
    assert bytes_read(before, after) == 300


def test_tokens_of_shared_storage_are_accounted_for_twice() -> None:
    """By the engine, which calls them external, and by Stepwell, which names the tier."""

    def text(external: int, redis: int) -> str:
        return (
            'vllm:prompt_tokens_cached_by_source_total{engine="0",source="external_unspecified"} '
            f"{external}.0\n"
            f'vllm:stepwell_served_tokens_total{{engine="0",tier="redis"}} {redis}.0\n'
            'vllm:stepwell_served_tokens_total{engine="0",tier="host"} 99.0\n'
        )

    before, after = parse_metrics(text(7, 6)), parse_metrics(text(1031, 1030))
    assert token_counts(before, after) == TokenCounts(shared=1024)
    assert tokens_served(before, after, "redis") == 1024
    assert tokens_served(before, after, "disk") == 0
    tokens = TokenCounts(computed=176, shared=1024)
    assert a_row("redis", 0.2, tokens=tokens, served=1024).accounted
    assert not a_row("redis", 0.2, tokens=tokens, served=1023).accounted
    assert a_row(DISK, 0.2, served=1024).accounted


def test_the_drives_of_a_stripe_serve_together() -> None:
    text = "".join(
        f'vllm:stepwell_served_tokens_total{{tier="disk{idx}"}} {idx + 1}.0\n' for idx in range(3)
    )
    assert tokens_served({}, parse_metrics(text), "disk") == 6


def test_what_was_written_and_not_served_has_its_reason() -> None:
    def text(not_worth: int) -> str:
        return (
            'vllm:stepwell_missed_tokens_total{engine="0",reason="absent"} 1024.0\n'
            f'vllm:stepwell_missed_tokens_total{{engine="0",reason="not_worth"}} {not_worth}.0\n'
        )

    missed = tokens_missed(parse_metrics(text(128)), parse_metrics(text(640)))
    assert missed == {"not_worth": 512}
    assert tokens_missed({}, parse_metrics(text(0))) == {"absent": 1024}
    row = a_row(DISK, 0.2, missed={**missed, "checksum": 128})
    assert to_json(a_result(row))["rows"][0]["missed_tokens"] == row.missed  # type: ignore[index]
    words = verdict(a_result(a_row(RECOMPUTE, 4.0), row))
    assert (
        "Not all that was written was read: disk at 1, since reading was expected to end later "
        "(read_when); disk at 1, checksum." in words
    )
    assert "was read" not in verdict(a_result(a_row(RECOMPUTE, 4.0), a_row(DISK, 0.2)))


def test_text_of_a_demo_on_shared_storage() -> None:
    tokens = TokenCounts(computed=176, shared=1024)
    rows = a_row(RECOMPUTE, 4.0), a_row("redis", 0.2, tokens=tokens), a_row(DEVICE, 0.1)
    configuration = {**CONFIGURATION, "url": "redis://h"}
    result = DemoResult("a model", 600, 2, rows, configuration, store="redis", left="What is left.")
    text = " ".join(to_text(result).split())
    assert "Store: redis://h." in text
    assert "device host shared read" in text
    assert "From redis the first token came 20.0 times sooner at concurrency 1" in text
    assert "What is left." in text
    assert "/dev/disk" not in text


def test_a_row_compares_token_by_token() -> None:
    answers = (Answer(0, 0.5, 1.0, (1, 2)), Answer(1, 0.25, 1.0, (3, 4)))
    load = LoadResult(answers, wall_s=2.0)
    numbers = {"tokens_asked": 10, "bytes_read": 1, "bytes_read_physical": 2}
    for reference, equal in (([(1, 2), (3, 4)], True), ([(1, 2), (3, 5)], False)):
        row = make_row(DISK, 1, load, reference, tokens=TokenCounts(computed=10), **numbers)
        assert row.answers_equal is equal
        assert row.output_tokens_per_s == 2.0
        assert row.ttft_s == (0.5, 0.25)
        assert row.accounted


def test_json_has_the_promised_shape() -> None:
    result = a_result(
        a_row(RECOMPUTE, 4.0),
        a_row(RECOMPUTE, 8.0, concurrency=4),
        a_row(DISK, 0.2, bytes_read=5, bytes_read_physical=6),
        a_row(DISK, 0.5, concurrency=4),
        a_row(DEVICE, 0.1),
    )
    data = json.loads(json.dumps(to_json(result)))
    assert {"model", "prompt_tokens", "sessions", "rows", "speedup_ttft_p50"} <= set(data)
    assert data["speedup_ttft_p50"] == {"1": pytest.approx(20.0), "4": pytest.approx(16.0)}
    assert data["rows"][2] == {
        "mode": "disk",
        "concurrency": 1,
        "ttft_p50_s": 0.2,
        "ttft_p90_s": 0.2,
        "ttft_p99_s": 0.2,
        "output_tokens_per_s": 10.0,
        "tokens": {"computed": 176, "device": 0, "host": 0, "disk": 1024, "shared": 0},
        "missed_tokens": {},
        "bytes_read": 5,
        "bytes_read_physical": 6,
        "answers_equal": True,
    }


def test_text_ends_in_the_verdict() -> None:
    result = a_result(a_row(RECOMPUTE, 4.0), a_row(DISK, 0.2), a_row(VLLM_FS, 0.25))
    text = to_text(result)
    assert max(map(len, text.splitlines())) <= 120
    assert " ".join(text.split()).endswith(verdict(result))
    assert "20.0 times sooner at concurrency 1" in verdict(result)
    assert "vLLM's own fs tier: 16.0 times" in verdict(result)
    assert "Every reused token is accounted for: of 3600 prompt tokens asked 2048" in verdict(
        result
    )
    assert "All answers were equal." in verdict(result)
    assert result.ok


def test_a_missing_token_and_a_wrong_answer_are_said() -> None:
    wrong = a_row(DISK, 0.2, tokens=TokenCounts(computed=176, disk=896), answers_equal=False)
    result = a_result(a_row(RECOMPUTE, 4.0), wrong)
    assert not result.ok
    assert "NOT every token is accounted for" in verdict(result)
    assert "disk at 1: 1072 of 1200" in verdict(result)
    assert "Answers DIFFER from recomputation: disk at 1." in verdict(result)
    assert "DIFFER" in to_text(result)


def test_table_columns_are_aligned() -> None:
    table = format_table(("a", "long"), [("word", "1"), ("b", "22")])
    assert table.splitlines() == ["a     long", "----  ----", "word     1", "b       22"]
