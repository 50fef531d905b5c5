"""The identity of a vLLM engine's KV cache: all that its bytes depend on besides tokens."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from stepwell.core.identity import Identity, JsonValue
from stepwell.engines.weights import fingerprint
from stepwell.errors import ConfigError

__all__ = ["describe_engine", "with_hash"]


# Of vLLM's variables those that change what is computed by more than rounding.
_ENVIRONMENT = (
    "VLLM_CPU_INT4_W4A8",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
)


def describe_engine(
    vllm_config: Any,
    kv_cache_config: Any,
    offloading_config: Any,
    *,
    weights_id: str,
    chunk_bytes: int,
) -> Identity:
    """The identity without the block hash, which vLLM sets up later (see `with_hash`).

    Reads the model's weight files; for start-up only.

    Args:
        vllm_config: vLLM's whole configuration.
        kv_cache_config: groups, specs and layout of the KV cache.
        offloading_config: vLLM's summary of both for offloading.
        weights_id: from the settings; "" for a fingerprint of the weight files.
        chunk_bytes: length of one chunk, all workers together.

    Raises:
        ConfigError: something that the keys do not commit to is in use (LoRA, weights replaced
            in the running engine), or the weights cannot be fingerprinted.
    """
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "LoRA is on, and vLLM's block keys know an adapter by its name and path, not by its "
            "weights; start the engine without --enable-lora: engine=vllm"
        )
    if vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "weight transfer is on, and weights that are replaced in a running engine leave "
            "Stepwell with the old ones' KV; start the engine without --weight-transfer-config: "
            "engine=vllm"
        )
    fields = {
        "engine": "vllm",
        "engine_version": _engine_version(),
        "platform": _platform(),
        **_model_fields(vllm_config, weights_id),
        **_layout_fields(vllm_config, kv_cache_config, offloading_config),
        "chunk_bytes": chunk_bytes,
    }
    return Identity(fields, {"model": str(vllm_config.model_config.model)})


def _model_fields(vllm_config: Any, weights_id: str) -> dict[str, JsonValue]:
    model = vllm_config.model_config
    config = _without_origin(model.hf_config.to_dict())
    fields: dict[str, JsonValue] = {
        "weights": weights_id or _weights(model, vllm_config.load_config),
        "loader": _loader(model, vllm_config.load_config),
        "model_config": _digest(config),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": _digest([model.quantization, model.quantization_config])
        if model.quantization or model.quantization_config
        else None,
        "speculative": _speculative(vllm_config),
        "multimodal": _digest(repr(model.multimodal_config)) if model.multimodal_config else None,
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }
    if _rope_depends_on_length(config):
        fields["max_model_len"] = model.max_model_len
    return fields


def _layout_fields(
    vllm_config: Any, kv_cache_config: Any, offloading_config: Any
) -> dict[str, JsonValue]:
    groups: list[JsonValue] = [
        {
            "tokens_per_block": group.tokens_per_block,
            "layers": _digest(list(group.layer_names)),
            "spec": _spec_text(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec),
        }
        for group in offloading_config.groups
    ]
    parallel = offloading_config.parallel
    return {
        "kv_dtype": offloading_config.model.dtype,
        "kv_cache_layout": offloading_config.kv_cache_layout,
        "canonical_layout": offloading_config.canonical_layout,
        "kv_groups": groups,
        "block_tokens": offloading_config.cache.tokens_per_hash,
        "blocks_per_chunk": offloading_config.cache.blocks_per_chunk,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pp_partition": os.environ.get("VLLM_PP_LAYER_PARTITION"),
        "prefill_cp": parallel.pcp_size,
        "decode_cp": parallel.dcp_size,
        "cp_interleave": vllm_config.parallel_config.cp_kv_cache_interleave_size,
        "replicated": offloading_config.replicated_layout,
        "model_runner": "v2" if vllm_config.use_v2_model_runner else "v1",
        "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
    }


def with_hash(identity: Identity, first_hash: bytes) -> Identity:
    """The whole identity.

    Args:
        identity: from `describe_engine`.
        first_hash: what vLLM chains the first block's hash from: the configured hash function
            over a seed. It therefore tells hash functions and PYTHONHASHSEEDs apart.
    """
    return Identity({**identity.fields, "hash_seed": first_hash.hex()}, identity.labels)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _spec_text(spec: Any) -> str:
    return f"{type(spec).__name__}:{_digest(repr(spec))}"


def _engine_version() -> str:
    import vllm

    return str(vllm.__version__)


def _platform() -> str:
    import torch
    from vllm.platforms import current_platform

    name = str(current_platform.device_type)
    if name != "cpu":
        return name
    # The CPU backend packs a block's bytes by instruction set.
    amx = bool(torch.cpu._is_amx_tile_supported())
    return f"cpu:{torch.backends.cpu.get_cpu_capability()}:amx={amx}"


def _loader(model: Any, load_config: Any) -> str:
    """Which files are loaded, and by whose code: the fingerprint covers all that lie there."""
    return _digest(
        [
            str(load_config.load_format),
            load_config.ignore_patterns,
            load_config.model_loader_extra_config,
            str(model.model_impl),
            model.code_revision,
            model.model_class_overrides,
        ]
    )


def _weights(model: Any, load_config: Any) -> str:
    if str(getattr(load_config.load_format, "value", load_config.load_format)) == "dummy":
        return f"dummy:seed={model.seed}"
    name = str(model.model_weights or model.model)
    path = _model_path(name, model.revision, load_config.download_dir)
    return fingerprint(path)


def _model_path(name: str, revision: str | None, download_dir: str | None) -> Path:
    path = Path(name)
    if path.exists():
        return path
    try:
        if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
            raise ValueError("loaded from another hub")
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"the model's files were not found, so its weights cannot be fingerprinted; set "
            f"weights_id to a text that changes with the weights: model={name}"
        ) from error


def _speculative(vllm_config: Any) -> str | None:
    config = vllm_config.speculative_config
    if config is None:
        return None
    draft = getattr(config, "draft_model_config", None)
    # Without a model of its own (n-grams, say) a draft has no weights.
    weights = _weights(draft, vllm_config.load_config) if draft is not None else None
    return _digest([str(config.method), str(getattr(draft, "dtype", None)), weights])


def _without_origin(config: Any) -> Any:
    """A model's configuration without where it came from and who wrote it down."""
    origin = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
    if isinstance(config, dict):
        return {k: _without_origin(v) for k, v in config.items() if k not in origin}
    if isinstance(config, list | tuple):
        return [_without_origin(value) for value in config]
    return config


def _rope_depends_on_length(config: Any) -> bool:
    # "dynamic" and "longrope" pick their factors by the longest request that is allowed. The
    # whole text is searched, since composed models nest the configuration that says so.
    text = json.dumps(config, default=str)
    return any(f'"{word}"' in text for word in ("dynamic", "longrope", "su"))
