"""A fingerprint of a model's weights, so that new weights under an old path are a new root."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import xxhash

from stepwell.errors import ConfigError

__all__ = ["FULL_BYTES", "fingerprint"]

WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npz", ".ckpt")
)

# What a model directory holds besides what its KV depends on. Everything else is hashed: weights
# of every format, the index that says which are loaded, code, configurations of processors.
_HARMLESS = re.compile(
    r"(?i)readme|licen[cs]e|notice|tokenizer|special_tokens|added_tokens|vocab|merges"
    r"|chat_template|generation_config|.*\.(md|txt|jinja|png|jpe?g|svg|html|pdf|lock)$"
)

# Up to this much is hashed in full: about two seconds (0.4 s/GiB measured) from the page cache,
# where the engine has just left it. Beyond, evenly spaced samples are, so that the cost does not
# grow with the model.
FULL_BYTES = 4 << 30
_SAMPLES_PER_FILE = 2048
_SAMPLE_BYTES = 4096
_HEAD_BYTES = 16 << 20  # a safetensors header (names, dtypes, shapes, offsets) lies within


def fingerprint(model_dir: Path, *, full_bytes: int = FULL_BYTES) -> str:
    """A digest over the names, sizes and content of all files that a model's KV may depend on.

    Up to ``full_bytes`` everything is read whole. Of larger models the first 16 MiB, the end and
    2048 evenly spaced 4 KiB samples of each file are read: retrained, merged or quantized weights
    differ in them, a change of single values elsewhere may not. ``weights_id`` in the settings
    overrides the fingerprint where that matters.

    Args:
        model_dir: of the model, or one file of weights.
        full_bytes: see above.

    Raises:
        ConfigError: there are no weight files, or one cannot be read.
    """
    files = [model_dir]
    if not model_dir.is_file():
        relative = {path: path.relative_to(model_dir).parts for path in model_dir.rglob("*")}
        files = sorted(
            path
            for path, parts in relative.items()
            if path.is_file() and not _is_harmless(path, parts)
        )
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise ConfigError(
            f"no weight files to fingerprint; set weights_id to a text that changes with the "
            f"weights: model={model_dir}"
        )
    try:
        sizes = [path.stat().st_size for path in files]
        whole = sum(sizes) <= full_bytes
        digest = xxhash.xxh3_128()
        for path, size in zip(files, sizes, strict=True):
            name = path.name if path == model_dir else path.relative_to(model_dir).as_posix()
            digest.update(f"{name}\0{size}\0".encode())
            for piece in _pieces(path, size, whole=whole):
                digest.update(piece)
    except OSError as error:
        raise ConfigError(
            f"a weight file cannot be read ({error.strerror}): file={error.filename}"
        ) from error
    return f"xxh3-128:{'full' if whole else 'sampled'}:{digest.hexdigest()}"


def _is_harmless(path: Path, parts: tuple[str, ...]) -> bool:
    if any(part.startswith(".") for part in parts):
        return True  # what tools leave behind; engines do not load from there
    if path.suffix in WEIGHT_SUFFIXES or path.suffix == ".py":
        return False  # whatever it is called
    return any(_HARMLESS.match(part) for part in parts)


def _pieces(path: Path, size: int, *, whole: bool) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        if whole or size <= _HEAD_BYTES:
            while piece := file.read(8 << 20):
                yield piece
            return
        yield os.pread(file.fileno(), _HEAD_BYTES, 0)
        step = (size - _SAMPLE_BYTES) / (_SAMPLES_PER_FILE - 1)
        for idx in range(_SAMPLES_PER_FILE):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, int(idx * step))
