"""Models, reference answers and engine processes that the engine tests share."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stepwell.bench.model import make_model, make_sliding_window_model
from tests.engines.harness import EngineProcess, prompt

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm*.py"]


def pytest_report_header() -> str:
    """Say so where the real-engine tests are left out."""
    if collect_ignore_glob:
        return "real-engine tests are LEFT OUT: vLLM is not installed (scripts/env engine)"
    return "real-engine tests: vLLM found"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny seeded Llama: 4 KiB of KV per token, 512 KiB per chunk of 128 tokens."""
    return make_model(
        tmp_path_factory.mktemp("model") / "tiny",
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=2,
        intermediate=512,
    )


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return make_model(
        tmp_path_factory.mktemp("model") / "other",
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=2,
        intermediate=512,
        seed=1,
    )


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sliding-window and full-attention layers: several KV groups."""
    return make_sliding_window_model(tmp_path_factory.mktemp("model") / "hybrid")


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One process for many engines, one after another: an import of vLLM costs seconds."""
    with EngineProcess(tmp_path_factory.mktemp("engine") / "log") as process:
        yield process


@pytest.fixture
def engine(shared_engine: EngineProcess) -> Iterator[EngineProcess]:
    """The shared process with no engine running, before and after."""
    yield shared_engine
    if shared_engine.process.poll() is None:
        shared_engine.stop()


@pytest.fixture
def new_process(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Makes engine processes of their own; ends them all."""
    processes: list[EngineProcess] = []

    def make(env: dict[str, str] | None = None) -> EngineProcess:
        processes.append(EngineProcess(tmp_path / f"engine-{len(processes)}.log", env))
        return processes[-1]

    yield make
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def reference(model: Path, shared_engine: EngineProcess) -> Callable[[Sequence[int]], list[int]]:
    """What the engine answers without Stepwell, by prompt; computed once for all tests."""
    shared_engine.start(model, None, enable_prefix_caching=False)
    known = [prompt(seed, n) for seed in range(6) for n in (50, 127, 128, 256, 600, 1000)]
    shared = [prompt(90, 512) + prompt(seed, 200) for seed in range(91, 97)]
    answers: dict[tuple[int, ...], list[int]] = {}
    for one in [*known, *shared]:
        answers[tuple(one)] = shared_engine.answers([one])[0]
    shared_engine.stop()
    return lambda asked: answers[tuple(asked)]
