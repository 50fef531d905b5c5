"""vLLM's seam: what ``--kv-transfer-config`` names. `stepwell vllm-args` prints that."""

__all__ = ["StepwellConnector"]

try:
    from stepwell.engines.vllm_tier import StepwellConnector, StepwellTier

    __all__ += ["StepwellTier"]
except ImportError as error:
    from stepwell.engines.vllm_without import connector_without

    StepwellConnector = connector_without(str(error))  # type: ignore[misc]
