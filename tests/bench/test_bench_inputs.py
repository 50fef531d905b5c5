"""What the demo reads and checks: options, metrics text, events, model files, store files."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stepwell.bench import machine, procs, storefiles
from stepwell.bench.demo import DemoOptions, check_options
from stepwell.bench.load import parse_event
from stepwell.bench.model import make_model
from stepwell.bench.prometheus import has, parse_metrics, total
from stepwell.bench.server import ServerError
from stepwell.bench.text import TextSource, make_prompt
from stepwell.errors import ConfigError


def test_metrics_text_is_parsed() -> None:
    metrics = parse_metrics(
        "# HELP a:b_total words\n# TYPE a:b_total counter\n"
        'a:b_total{engine="0",source="disk"} 1.5e+03\n'
        'a:b_total{engine="1",source="disk"} 2.0 1700000000000\n'
        'a:b_total{engine="0",source="say \\"hi\\", {x}"} 7\n'
        'plain 3\nhistogram_bucket{le="+Inf"} 4.0\n\nnot a sample\n'
    )
    assert total(metrics, "a:b_total") == 1509
    assert total(metrics, "a:b_total", {"source": "disk"}) == 1502
    assert total(metrics, "a:b_total", {"source": "disk", "engine": "1"}) == 2
    assert total(metrics, "a:b_total", {"source": 'say "hi", {x}'}) == 7
    assert total(metrics, "plain") == 3
    assert has(metrics, "histogram_bucket")
    assert not has(metrics, "a:b")
    assert total(metrics, "missing") == 0


def test_events_give_token_ids() -> None:
    assert parse_event(b'data: {"choices": [{"text": "x", "token_ids": [5, 6]}]}\n') == [5, 6]
    assert parse_event(b'data: {"choices": []}\n') == []
    assert parse_event(b"data: [DONE]\n") == []
    assert parse_event(b"\n") == []
    with pytest.raises(ServerError, match="reports an error"):
        parse_event(b'data: {"error": {"message": "no"}}\n')


def test_text_is_seeded_and_prompts_differ_from_their_start() -> None:
    assert TextSource(3).sentence() == TextSource(3).sentence()
    assert TextSource(3).sentence() != TextSource(4).sentence()

    def encode(text: str) -> list[int]:
        return list(text.encode())

    prompts = [make_prompt(encode, 500, seed=seed, bos=1) for seed in range(20)]
    assert all(len(prompt) == 500 and prompt[0] == 1 for prompt in prompts)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert prompts[7] == make_prompt(encode, 500, seed=7, bos=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sessions": 0}, "sessions must be at least 1"),
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1"),
        ({"max_tokens": -1}, "max_tokens must be at least 1"),
        ({"concurrencies": ()}, "concurrencies must be distinct numbers"),
        ({"concurrencies": (1, 1)}, "concurrencies=1,1"),
        ({"concurrencies": (0,)}, "concurrencies=0"),
        ({"concurrencies": (9,)}, "concurrencies=9"),
        ({"model": "/no/such/model"}, "model=/no/such/model"),
        ({"path": "/no/such/directory"}, "does not exist: path=/no/such/directory"),
        ({"path": "/etc/hostname"}, "is no directory: path=/etc/hostname"),
        ({"capacity": "20"}, "capacity"),
        ({"capacity": "1023KiB"}, "capacity is at least 1MiB"),
        ({"capacity": "8000000TiB"}, "larger than the file system"),
    ],
)
def test_wrong_options_are_one_clear_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(replace(DemoOptions(), **change))  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a model directory"):
        machine.read_model(tmp_path)


def test_model_facts_are_read(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"__metadata__": {}, "w": {"shape": [3, 4]}, "b": {"shape": [4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    info = machine.read_model(tmp_path)
    assert info.kv_bytes_per_token == 12 * 2 * 4 * 64 * 4
    assert (info.num_parameters, info.max_tokens, info.bos) == (16, 8192, 1)


def test_model_parameters_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head size"):
        make_model(tmp_path / "model", hidden=100, heads=10, kv_heads=2)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        make_model(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_store_files_are_watched_and_dropped(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.kv").write_bytes(b"x" * 5000)
    assert [size for size, _ in storefiles.snapshot(tmp_path).values()] == [5000]
    assert storefiles.drop_page_cache(tmp_path) == 1
    assert storefiles.wait_until_stable(tmp_path, quiet_s=0.2, timeout_s=5.0)
    assert not storefiles.wait_until_stable(tmp_path, quiet_s=2.0, timeout_s=0.3)


def test_processes_of_a_group_are_found_and_their_reads_counted() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        assert procs.group_pids(child.pid) == [child.pid]
        assert procs.read_bytes_physical(child.pid) >= 0
        assert procs.offload_files([child.pid]) == set()
    finally:
        child.communicate(b"\n", timeout=30)
    assert procs.group_pids(child.pid) == []


def test_machine_is_described() -> None:
    kind, device = machine.file_system(Path("/proc/self"))
    assert kind == "proc"
    assert device
    assert machine.num_cpus() >= 1
    assert machine.cpu_name()
    assert machine.memory_available() > 0
