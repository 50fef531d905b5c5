"""Real vLLM engines over storage that they share."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from media.servers import Server, redis_server

from tests.engines.harness import BLOCK_TOKENS, EngineProcess, prompt, shared_config

pytestmark = pytest.mark.engine

Reference = Callable[[Sequence[int]], list[int]]
NewProcess = Callable[..., EngineProcess]
STORED = 7 * BLOCK_TOKENS


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    server, port = redis_server(tmp_path)
    with server:
        yield server, f"redis://127.0.0.1:{port}"


def test_what_one_engine_wrote_another_reads_at_once(
    model: Path, new_process: NewProcess, reference: Reference, redis: tuple[Server, str]
) -> None:
    """And one that computes in another dtype finds nothing."""
    _, url = redis
    prompts = [prompt(seed, 1000) for seed in range(2)]
    one, other = new_process(), new_process()
    for engine in (one, other):
        engine.start(model, shared_config(url))
    assert one.answers(prompts) == [reference(p) for p in prompts]
    one.call("drain")
    answers = other.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    assert [a["cached"] for a in answers] == [STORED] * 2
    other.call("drain")
    assert other.count("served_tokens", tier="redis") == 2 * STORED
    assert other.count("internal_errors") == one.count("internal_errors") == 0
    one.kill()

    other.stop()
    other.start(model, shared_config(url), dtype="bfloat16")
    assert [a["cached"] for a in other.call("generate", prompts=prompts)] == [0, 0]


def test_a_server_that_hangs_delays_a_request_once(
    model: Path, engine: EngineProcess, reference: Reference, redis: tuple[Server, str]
) -> None:
    server, url = redis
    prompts = [prompt(seed, 1000) for seed in range(4)]
    engine.start(model, shared_config(url, slow_after="1s", read_deadline="1s"))
    engine.answers(prompts)
    engine.call("forget")
    server.pause()
    answers = engine.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    assert [a["cached"] for a in answers] == [0] * 4
    server.resume()
    engine.call("drain")
    assert engine.count("internal_errors") == 0
