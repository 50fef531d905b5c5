"""A real vLLM over Stepwell: the answers are those of recomputation, whatever happened before."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.engines.harness import BLOCK_TOKENS, EngineProcess, prompt, records, transfer_config

pytestmark = pytest.mark.engine

Reference = Callable[[Sequence[int]], list[int]]
NewProcess = Callable[..., EngineProcess]


def test_a_fresh_process_reads_what_an_earlier_one_wrote(
    model: Path, new_process: NewProcess, reference: Reference, tmp_path: Path
) -> None:
    prompts = [prompt(0, 1000), prompt(1, 600)]
    first = new_process()
    first.start(model, transfer_config(tmp_path / "kv"))
    assert first.answers(prompts) == [reference(p) for p in prompts]
    first.call("drain")
    first.stop()
    first.close()
    # In the order of its prefix each, although vLLM hands over sets: neighbours are read at once.
    ends = [record.end_token for record in records(tmp_path / "kv")]
    long, short = ([BLOCK_TOKENS * (idx + 1) for idx in range(n)] for n in (7, 4))
    assert ends in (long + short, short + long)

    second = new_process()
    second.start(model, transfer_config(tmp_path / "kv"))
    answers = second.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    assert [a["cached"] for a in answers] == [7 * BLOCK_TOKENS, 4 * BLOCK_TOKENS]
    assert second.count("read_chunks", outcome="done") == 11
    sources = {
        series: value
        for series, value in second.call("prometheus").items()
        if series.startswith("vllm:prompt_tokens")
    }
    by_source = {
        source: sources.get(f"vllm:prompt_tokens_cached_by_source{{source={source}}}", 0)
        for source in ("device", "host", "disk", "external_unspecified")
    }
    computed = sources["vllm:prompt_tokens_by_source{source=local_compute}"]
    assert by_source["disk"] == 11 * BLOCK_TOKENS
    assert computed + sum(by_source.values()) == 1600


def test_a_killed_process_loses_at_most_what_was_in_flight(
    model: Path, new_process: NewProcess, reference: Reference, tmp_path: Path
) -> None:
    prompts = [prompt(seed, 1000) for seed in range(4)]
    first = new_process()
    first.start(model, transfer_config(tmp_path / "kv"))
    assert first.answers(prompts[:3]) == [reference(p) for p in prompts[:3]]
    first.call("drain")
    assert first.answers(prompts[3:]) == [reference(p) for p in prompts[3:]]
    first.kill()

    second = new_process()
    second.start(model, transfer_config(tmp_path / "kv"))
    assert list((tmp_path / "kv/partial").iterdir()) == []
    answers = second.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    # Only the last prompt was in flight when the process was killed.
    assert sum(a["cached"] for a in answers) >= 3 * 7 * BLOCK_TOKENS
    assert second.count("quarantined_chunks") == 0


@pytest.mark.parametrize("tokens_per_chunk", [BLOCK_TOKENS, 2 * BLOCK_TOKENS])
def test_requests_at_once_that_share_a_prefix(
    tokens_per_chunk: int, model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    prompts = [prompt(90, 512) + prompt(seed, 200) for seed in range(91, 97)]
    transfer = transfer_config(tmp_path / "kv")
    transfer["kv_connector_extra_config"]["block_size"] = tokens_per_chunk
    engine.start(model, transfer)
    assert engine.answers(prompts, together=True) == [reference(p) for p in prompts]
    assert engine.call("forget")
    answers = engine.call("generate", prompts=prompts, together=True)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    assert all(a["cached"] >= 512 for a in answers)
    assert engine.count("read_chunks", outcome="done") >= 512 // tokens_per_chunk


@pytest.mark.parametrize("num_tokens", [50, 127, 128, 256])
def test_prompts_at_and_below_a_chunk_boundary(
    num_tokens: int, model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    one = prompt(0, num_tokens)
    engine.start(model, transfer_config(tmp_path / "kv"))
    assert engine.answers([one]) == [reference(one)]
    assert engine.call("forget")
    answer = engine.call("generate", prompts=[one])[0]
    assert answer["ids"] == reference(one)
    whole_chunks = num_tokens // BLOCK_TOKENS
    assert engine.count("read_chunks", outcome="done") == whole_chunks
    assert answer["cached"] == whole_chunks * BLOCK_TOKENS
    asked = engine.count("lookups")
    assert asked == engine.count("lookups", answer="hit") + engine.count("lookups", answer="miss")


def test_preempted_requests(model: Path, engine: EngineProcess, tmp_path: Path) -> None:
    prompts = [prompt(seed, 600) for seed in range(5)]
    engine.start(model, None, kv_cache_memory_bytes=64 << 20)
    ample = engine.answers(prompts, max_tokens=150, together=True)
    engine.stop()
    small = {"kv_cache_memory_bytes": 13 << 20, "max_model_len": 1024}
    engine.start(model, transfer_config(tmp_path / "kv"), **small)
    for _ in range(2):
        assert engine.answers(prompts, max_tokens=150, together=True) == ample
        engine.call("forget")
    assert engine.call("preemptions") > 0


def test_cancelled_requests_leave_nothing_behind(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    prompts = [prompt(seed, 1000) for seed in range(4)]
    engine.start(model, transfer_config(tmp_path / "kv"))
    engine.call("cancel", prompts=prompts, steps=2)  # while computing and storing
    engine.call("forget")
    engine.answers(prompts)
    engine.call("forget")
    for steps in (1, 2, 3):  # while reading back
        engine.call("cancel", prompts=prompts, steps=steps)
        engine.call("forget")
    answers = engine.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    assert all(a["cached"] == 7 * BLOCK_TOKENS for a in answers)
    assert engine.count("internal_errors") == 0


def test_more_prompts_than_the_capacity(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    capacity_bytes = 6 << 20  # eleven chunks
    prompts = [prompt(seed, 1000) for seed in range(5)]
    engine.start(model, transfer_config(tmp_path / "kv", "6MiB"))
    for _ in range(2):
        assert engine.answers(prompts) == [reference(p) for p in prompts]
        engine.call("forget")
        files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= capacity_bytes
    assert engine.count("evicted_chunks") > 0
    # What is left is whole beginnings of the latest prompts, so it is of use.
    answer = engine.call("generate", prompts=[prompts[-1]])[0]
    assert answer["cached"] == 7 * BLOCK_TOKENS


def test_a_conversation_keeps_its_beginning(
    model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    """The device and the primary serve a conversation's earlier turns, so that the tier is not
    asked for them; their chunks aged, and left before the later turns that need them.
    """
    turns = [prompt(7, 128 * n) for n in (3, 4, 5)]
    engine.start(model, transfer_config(tmp_path / "kv", "6MiB"))  # eleven chunks
    for turn in turns:
        engine.answers([turn])
        engine.call("drain")
        engine.answers([prompt(len(turn), 300)])  # two chunks of somebody else, each time
        engine.call("drain")
    engine.answers([turns[-1]])
    engine.answers([prompt(99, 700)])  # five chunks: something has to leave
    assert engine.call("forget")
    assert engine.count("evicted_chunks") > 0
    assert engine.call("generate", prompts=[turns[-1]])[0]["cached"] == 5 * BLOCK_TOKENS


def test_a_primary_smaller_than_the_prompts(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    prompts = [prompt(seed, 1000) for seed in range(4)]
    engine.start(model, transfer_config(tmp_path / "kv"))
    engine.answers(prompts)
    engine.call("drain")
    engine.stop()
    engine.start(model, transfer_config(tmp_path / "kv", primary="3MiB"))  # six chunks
    for _ in range(2):
        assert engine.answers(prompts, together=True) == [reference(p) for p in prompts]
        engine.call("forget")
    # vLLM computes what finds no room in its primary, and that is counted as what it is.
    assert engine.count("read_chunks", outcome="done") > 0
    assert engine.count("lookups", answer="miss", reason="unread") > 0


def test_two_roots_take_turns_on_one_directory(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    one = prompt(0, 1000)
    transfer = transfer_config(tmp_path / "kv")
    for dtype, cached in (("float32", 0), ("bfloat16", 0), ("float32", 7), ("bfloat16", 7)):
        engine.start(model, transfer, dtype=dtype)
        answer = engine.call("generate", prompts=[one])[0]
        if dtype == "float32":
            assert answer["ids"] == reference(one)
        assert answer["cached"] == cached * BLOCK_TOKENS
        engine.call("drain")
        engine.stop()
    assert len(list((tmp_path / "kv/roots").iterdir())) == 2


def test_a_hybrid_model(hybrid_model: Path, engine: EngineProcess, tmp_path: Path) -> None:
    prompts = [prompt(seed, 1000) for seed in range(3)]
    engine.start(hybrid_model, None)
    expected = engine.answers(prompts)
    engine.stop()
    engine.start(hybrid_model, transfer_config(tmp_path / "kv"))
    assert engine.answers(prompts) == expected
    assert engine.call("forget")
    answers = engine.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == expected
    assert all(a["cached"] == 7 * BLOCK_TOKENS for a in answers)
    groups = {record.key[-4:] for record in records(tmp_path / "kv")}
    assert len(groups) > 1, "the model was to have several KV groups"


@pytest.mark.slow
def test_tensor_parallel_two(
    model: Path, new_process: NewProcess, reference: Reference, tmp_path: Path
) -> None:
    prompts = [prompt(0, 1000), prompt(1, 600)]
    for cached in ([0, 0], [7 * BLOCK_TOKENS, 4 * BLOCK_TOKENS]):
        process = new_process({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
        process.start(
            model,
            transfer_config(tmp_path / "kv"),
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
        answers = process.call("generate", prompts=prompts, max_tokens=8)
        assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
        assert [a["cached"] for a in answers] == cached
        # Two more requests give the last stores of the first two time to end.
        process.answers([prompt(2, 50), prompt(3, 50)])
        process.close()


def test_time_on_the_scheduler_thread(
    model: Path, engine: EngineProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints how long the calls take that vLLM makes on its scheduler thread."""
    prompts = [prompt(seed, 1000) for seed in range(6)]
    engine.start(model, transfer_config(tmp_path / "kv"))
    engine.call("time_calls")
    for _ in range(5):
        engine.answers(prompts, together=True)
        engine.call("forget")
    with capsys.disabled():
        print("\ncall               calls   p50_us   p99_us   max_us")
        for name, seconds in engine.call("timings_s").items():
            assert seconds, f"{name} was never called"
            ordered = sorted(seconds)
            p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
            print(
                f"{name:18} {len(ordered):5} {statistics.median(ordered) * 1e6:8.0f} "
                f"{p99 * 1e6:8.0f} {ordered[-1] * 1e6:8.0f}"
            )
