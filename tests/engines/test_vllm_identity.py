"""Another identity is a miss that `stepwell inspect` explains; the engine never crashes.

LMCache 0.5.6 served the old weights' KV under new weights, and vLLM's engine died when float16
met bfloat16 entries.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.harness import BLOCK_TOKENS, EngineProcess, prompt, transfer_config

pytestmark = pytest.mark.engine

Reference = Callable[[Sequence[int]], list[int]]
NewProcess = Callable[..., EngineProcess]


def inspect_text(path: Path) -> str:
    command = [sys.executable, "-m", "stepwell", "inspect", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_once(process: EngineProcess, model: Path, path: Path, **options: Any) -> dict[str, Any]:
    process.start(model, transfer_config(path), **options)
    answer = process.call("generate", prompts=[prompt(0, 1000)])[0]
    process.call("drain")
    process.stop()
    return dict(answer)


def test_other_weights_under_the_same_path(
    model: Path, other_weights: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    path, here = tmp_path / "kv", tmp_path / "model"
    shutil.copytree(model, here)
    assert run_once(engine, here, path)["ids"] == reference(prompt(0, 1000))
    engine.start(other_weights, None)
    expected = engine.answers([prompt(0, 1000)])[0]
    engine.stop()
    shutil.copy(other_weights / "model.safetensors", here / "model.safetensors")
    answer = run_once(engine, here, path)
    assert answer["cached"] == 0
    assert answer["ids"] == expected != reference(prompt(0, 1000))
    assert "weights" in inspect_text(path)


def test_the_same_model_elsewhere_is_the_same(
    model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    run_once(engine, model, tmp_path / "kv")
    shutil.copytree(model, tmp_path / "moved")
    answer = run_once(engine, tmp_path / "moved", tmp_path / "kv")
    assert answer["cached"] == 7 * BLOCK_TOKENS


def test_one_changed_weight_under_the_same_path(
    model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    path, here = tmp_path / "kv", tmp_path / "model"
    shutil.copytree(model, here)
    run_once(engine, here, path)
    with open(here / "model.safetensors", "r+b") as file:
        file.seek(1_000_000)
        file.write(b"\0\0")
    assert run_once(engine, here, path)["cached"] == 0


def test_another_format_in_the_same_directory(
    model: Path, other_weights: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    """The files were the same, only other ones were loaded: the old weights' KV was served."""
    from safetensors.torch import load_file
    from torch import save

    path, here = tmp_path / "kv", tmp_path / "model"
    shutil.copytree(model, here)
    save(load_file(other_weights / "model.safetensors"), here / "old.pt")
    run_once(engine, here, path, load_format="safetensors")
    engine.start(other_weights, None)
    expected = engine.answers([prompt(0, 1000)])[0]
    engine.stop()
    answer = run_once(engine, here, path, load_format="pt")
    assert (answer["cached"], answer["ids"]) == (0, expected)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"block_size": 64}, "block"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "hash"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
         "model"),
    ],
    ids=["dtype", "block_size", "hash_algorithm", "rope"],
)  # fmt: skip
def test_another_configuration(
    options: dict[str, Any], field: str, model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    run_once(engine, model, path)
    engine.start(
        model,
        None,
        enable_prefix_caching=False,
        **{k: v for k, v in options.items() if k != "prefix_caching_hash_algo"},
    )
    expected = engine.answers([prompt(0, 1000)])[0]
    engine.stop()
    answer = run_once(engine, model, path, **options)
    assert answer["cached"] == 0
    if options.get("dtype") != "bfloat16":  # whose runs differ among themselves
        assert answer["ids"] == expected
    assert field in inspect_text(path)
    block_tokens = options.get("block_size", BLOCK_TOKENS)
    assert run_once(engine, model, path, **options)["cached"] == 1000 // block_tokens * block_tokens


def test_another_pythonhashseed(
    model: Path, new_process: NewProcess, reference: Reference, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    for env, cached in (({}, 0), ({"PYTHONHASHSEED": "7"}, 0), ({"PYTHONHASHSEED": "7"}, 7)):
        process = new_process(env)
        answer = run_once(process, model, path)
        process.close()
        assert answer["ids"] == reference(prompt(0, 1000))
        assert answer["cached"] == cached * BLOCK_TOKENS
    assert "hash" in inspect_text(path)


@pytest.mark.slow
def test_another_tensor_parallel_size(
    model: Path,
    new_process: NewProcess,
    engine: EngineProcess,
    reference: Reference,
    tmp_path: Path,
) -> None:
    path = tmp_path / "kv"
    run_once(engine, model, path)
    process = new_process({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    process.start(
        model, transfer_config(path), tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    answer = process.call("generate", prompts=[prompt(0, 1000)])[0]
    process.answers([prompt(2, 50)])
    process.close()
    assert answer["cached"] == 0
    assert answer["ids"] == reference(prompt(0, 1000))
    text = inspect_text(path)
    assert "tp" in text
    command = [sys.executable, "-m", "stepwell", "inspect", "--json", str(path)]
    data = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(data["roots"]) == 2
