"""The fingerprint of a model's files: whatever its KV may depend on changes it, nothing else."""

from pathlib import Path

import pytest

from stepwell.engines.weights import fingerprint
from stepwell.errors import ConfigError


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (folder / "sub/more.bin").write_bytes(b"x" * 5000)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "modeling_own.py").write_text("factor = 1")
    (folder / "preprocessor_config.json").write_text("{}")
    for name in ("README.md", "LICENSE", "tokenizer.json", "generation_config.json", ".lock"):
        (folder / name).write_text("words")
    return folder


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "sub/more.bin", "model.safetensors.index.json", "modeling_own.py",
     "preprocessor_config.json"],
)  # fmt: skip
def test_what_kv_may_depend_on_changes_it(model_dir: Path, name: str) -> None:
    """The index alone decides which weights are loaded; a file was read, the index was not."""
    before = fingerprint(model_dir)
    data = bytearray((model_dir / name).read_bytes())
    data[-1] ^= 1
    (model_dir / name).write_bytes(data)
    assert fingerprint(model_dir) != before


@pytest.mark.parametrize(
    "name",
    [
        "new.safetensors",
        "model.tensors",
        "adapter.pt",
        "new.yaml",
        "vocab_parallel.safetensors",
        "tokenizer_embedding.bin",
        "tokenizer.py",
    ],
)
def test_a_new_file_changes_it(model_dir: Path, name: str) -> None:
    before = fingerprint(model_dir)
    (model_dir / name).write_bytes(b"new")
    assert fingerprint(model_dir) != before


def test_what_kv_does_not_depend_on_does_not(model_dir: Path, tmp_path: Path) -> None:
    before = fingerprint(model_dir)
    for name in ("README.md", "LICENSE", "tokenizer.json", "generation_config.json", ".lock"):
        (model_dir / name).write_text("other words")
    (model_dir / ".cache").mkdir()
    (model_dir / ".cache/state.json").write_text("{}")
    assert fingerprint(model_dir) == before
    model_dir.rename(tmp_path / "moved")
    assert fingerprint(tmp_path / "moved") == before


def test_a_large_model_is_sampled_at_both_ends_and_between(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    path.write_bytes(bytes(40 << 20))
    before = fingerprint(path, full_bytes=1 << 20)
    assert before.startswith("xxh3-128:sampled:")
    for offset in (0, (16 << 20) - 1, (40 << 20) - 1):
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(b"\1")
        assert fingerprint(path, full_bytes=1 << 20) != before
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(b"\0")
    with open(path, "r+b") as file:  # retraining changes everything
        file.seek(20 << 20)
        file.write(b"\1" * (1 << 20))
    assert fingerprint(path, full_bytes=1 << 20) != before


def test_no_weights_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="set weights_id"):
        fingerprint(tmp_path)
