"""A connector for a vLLM without tiered offloading: refuses to start, or does nothing if asked."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from stepwell.engines.vllm_check import check_without, reported

__all__ = ["connector_without"]


class _Nothing(KVConnectorBase_V1, SupportsHMA):
    """Finds nothing, keeps nothing, holds nothing back."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def connector_without(error: str) -> type[KVConnectorBase_V1]:
    """The class to use when `stepwell.engines.vllm_tier` could not be imported.

    Args:
        error: what could not be imported, for the message.
    """

    class StepwellConnector(_Nothing):
        """Starts only with ``"if_incompatible": "start_without"``; then does nothing."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            with reported():
                check_without(vllm_config.kv_transfer_config.kv_connector_extra_config, error)
            super().__init__(vllm_config, role, kv_cache_config)

    return StepwellConnector
