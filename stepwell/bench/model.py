"""Small models with seeded random weights, made locally: nothing is downloaded.

`make_model` writes the demo's default model, a Llama; `make_sliding_window_model` a tiny hybrid
with several KV-cache groups, for tests. Both are Hugging Face directories that vLLM loads.
torch and transformers are imported only when a model is really made.
"""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepwell.bench.gemma import gemma_model
from stepwell.bench.text import TextSource
from stepwell.errors import ConfigError

__all__ = ["default_model_dir", "gemma_model", "make_model", "make_sliding_window_model"]

_MARKER = "stepwell-model.json"
_RECIPE = 1  # raise when the same parameters would give other weights or another tokenizer
# Head sizes that vLLM's CPU attention accepts (vLLM 0.32, `CPU_ATTN`).
_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Wide enough that greedy output of random weights varies instead of repeating one token.
_INITIALIZER_RANGE = 0.06
_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
_TRAINING_CHARS = 1_500_000
_CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

Parameters = dict[str, int | str]


def default_model_dir(parameters: Parameters) -> Path:
    """Returns where a model of these parameters is cached when the caller names no directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    text = json.dumps({"recipe": _RECIPE, **parameters}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return cache / "stepwell" / f"demo-model-{digest}"


def make_model(
    out_dir: str | os.PathLike[str] | None = None,
    *,
    layers: int = 12,
    hidden: int = 1024,
    heads: int = 16,
    kv_heads: int = 4,
    intermediate: int = 2816,
    vocab: int = 4096,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Makes a Llama with seeded random weights and a locally trained tokenizer, once.

    The defaults give 143.7 million parameters (575 MB in float32). A directory that already
    holds this model is returned as it is. The directory appears whole or not at all.

    Args:
        out_dir: where to write; None is `default_model_dir` of the parameters.
        layers: number of decoder layers.
        hidden: width; `hidden / heads` must be a head size that vLLM's CPU attention takes.
        heads: number of query heads.
        kv_heads: number of key/value heads, a divisor of `heads`.
        intermediate: width of the MLP.
        vocab: entries of the vocabulary, special tokens included; at least 300.
        seed: of the weights.
        dtype: "float32" or "bfloat16", how the weights are stored.

    Returns:
        The directory.

    Raises:
        ConfigError: the parameters do not fit together, or `out_dir` holds something else.
    """
    if hidden % heads or heads % kv_heads or hidden // heads not in _HEAD_DIMS:
        raise ConfigError(
            f"the head size must be one of {_HEAD_DIMS} and kv_heads must divide heads: "
            f"hidden={hidden} heads={heads} kv_heads={kv_heads}"
        )
    parameters: Parameters = {
        "kind": "llama", "layers": layers, "hidden": hidden, "heads": heads,
        "kv_heads": kv_heads, "intermediate": intermediate, "vocab": vocab, "seed": seed,
        "dtype": dtype,
    }  # fmt: skip

    def config() -> tuple[Any, Any]:
        transformers: Any = importlib.import_module("transformers")
        cfg = transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=intermediate,
            vocab_size=vocab,
            max_position_embeddings=32768,
            initializer_range=_INITIALIZER_RANGE,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return cfg, transformers.LlamaForCausalLM

    return _make_once(out_dir, parameters, config)


def make_sliding_window_model(
    out_dir: str | os.PathLike[str] | None = None,
    *,
    layers: int = 6,
    window: int = 256,
    hidden: int = 128,
    vocab: int = 1024,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Makes a tiny hybrid model: every third layer full attention, the others a sliding window.

    It has the group structure of Gemma 3 (several sliding-window KV groups and one with full
    attention), with 2 heads, 1 KV head and head size 64. Otherwise as `make_model`.

    Args:
        out_dir: where to write; None is `default_model_dir` of the parameters.
        layers: a multiple of 3.
        window: tokens that a sliding-window layer sees.
        hidden: width.
        vocab: entries of the vocabulary, at least 300.
        seed: of the weights.
        dtype: "float32" or "bfloat16", how the weights are stored.

    Raises:
        ConfigError: the parameters do not fit together, or `out_dir` holds something else.
    """
    if layers % 3:
        raise ConfigError(f"the hybrid model needs a multiple of 3 layers: layers={layers}")
    parameters: Parameters = {
        "kind": "hybrid", "layers": layers, "window": window, "hidden": hidden, "vocab": vocab,
        "seed": seed, "dtype": dtype,
    }  # fmt: skip

    def config() -> tuple[Any, Any]:
        transformers: Any = importlib.import_module("transformers")
        cfg = transformers.Gemma3TextConfig(
            num_hidden_layers=layers,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"]
            * (layers // 3),
            sliding_window=window,
            hidden_size=hidden,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            query_pre_attn_scalar=64,
            intermediate_size=2 * hidden,
            vocab_size=vocab,
            max_position_embeddings=32768,
            initializer_range=0.2,  # narrow layers: 0.06 lets one token win everywhere
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return cfg, transformers.Gemma3ForCausalLM

    return _make_once(out_dir, parameters, config)


def _make_once(
    out_dir: str | os.PathLike[str] | None,
    parameters: Parameters,
    config: Callable[[], tuple[Any, Any]],
) -> Path:
    """Builds the model beside `out_dir` and renames it into place; keeps one that is there."""
    target = Path(out_dir) if out_dir is not None else default_model_dir(parameters)
    if _is_ready(target, parameters):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_tokenizer(building, int(parameters["vocab"]))
        _write_weights(building, parameters, config)
        marker = {"recipe": _RECIPE, **parameters}
        (building / _MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        building.chmod(0o755)
        try:
            building.rename(target)
        except OSError:  # another process was faster; its model is as good
            if not _is_ready(target, parameters):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _is_ready(target: Path, parameters: Parameters) -> bool:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    try:
        marker = json.loads((target / _MARKER).read_text())
    except (OSError, ValueError):
        marker = None
    if marker != {"recipe": _RECIPE, **parameters}:
        raise ConfigError(f"the directory exists and holds something else: out_dir={target}")
    return True


def _write_weights(
    folder: Path, parameters: Parameters, config: Callable[[], tuple[Any, Any]]
) -> None:
    torch: Any = importlib.import_module("torch")
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    cfg, model_class = config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(parameters["seed"]))
        model = model_class(cfg)
    model.to(getattr(torch, str(parameters["dtype"]))).save_pretrained(folder)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Trains a byte-level BPE tokenizer on generated text and saves it with a chat template."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TextSource(0).paragraphs(_TRAINING_CHARS), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL_TOKENS)
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
