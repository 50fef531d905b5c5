"""The identity of a vLLM engine's KV cache: all that its bytes depend on besides tokens."""

import hashlib
import json
from pathlib import Path
from typing import Any

from stepwell.core.identity import Identity, JsonValue
from stepwell.engines.weights import fingerprint
from stepwell.errors import ConfigError

__all__ = ["describe_engine", "with_hash"]


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
    model = vllm_config.model_config
    groups: list[JsonValue] = [
        {
            "tokens_per_block": group.tokens_per_block,
            "layers": _digest(list(group.layer_names)),
            "spec": _spec_text(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec),
        }
        for group in offloading_config.groups
    ]
    parallel = offloading_config.parallel
    fields: dict[str, JsonValue] = {
        "engine": "vllm",
        "engine_version": _engine_version(),
        "platform": _platform(),
        "weights": weights_id or _weights(model, vllm_config.load_config),
        "model_config": _digest(model.hf_config.to_dict()),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": _digest([model.quantization, model.quantization_config])
        if model.quantization or model.quantization_config
        else None,
        "kv_dtype": offloading_config.model.dtype,
        "kv_cache_layout": offloading_config.kv_cache_layout,
        "canonical_layout": offloading_config.canonical_layout,
        "kv_groups": groups,
        "block_tokens": offloading_config.cache.tokens_per_hash,
        "blocks_per_chunk": offloading_config.cache.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "prefill_cp": parallel.pcp_size,
        "decode_cp": parallel.dcp_size,
        "replicated": offloading_config.replicated_layout,
        "model_runner": "v2" if vllm_config.use_v2_model_runner else "v1",
        "speculative": _speculative(vllm_config.speculative_config),
        "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
    }
    if _rope_depends_on_length(model.hf_config.to_dict()):
        fields["max_model_len"] = model.max_model_len
    return Identity(fields, {"model": str(model.model)})


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


def _weights(model: Any, load_config: Any) -> str:
    if str(getattr(load_config.load_format, "value", load_config.load_format)) == "dummy":
        return f"dummy:seed={model.seed}"
    return fingerprint(_model_path(str(model.model_weights or model.model), model.revision))


def _model_path(name: str, revision: str | None) -> Path:
    path = Path(name)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"the model's files were not found, so its weights cannot be fingerprinted; set "
            f"weights_id to a text that changes with the weights: model={name}"
        ) from error


def _speculative(config: Any) -> str | None:
    if config is None:
        return None
    draft = getattr(config, "draft_model_config", None)
    weights = None
    if draft is not None and Path(str(draft.model)).exists():
        weights = fingerprint(Path(str(draft.model)))
    return _digest([str(config.method), str(getattr(draft, "model", None)), weights])


def _rope_depends_on_length(hf_config: dict[str, Any]) -> bool:
    # "dynamic" and "longrope" pick their factors by the longest request that is allowed.
    text = json.dumps(
        [hf_config.get(name) for name in ("rope_scaling", "rope_parameters", "text_config")],
        default=str,
    )
    return '"dynamic"' in text or '"longrope"' in text or '"su"' in text
