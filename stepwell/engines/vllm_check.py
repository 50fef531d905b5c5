"""What is checked before vLLM starts with Stepwell: the settings, and that the version fits."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import stepwell
from stepwell.engines import vllm_contract
from stepwell.engines.contract import Difference
from stepwell.errors import ConfigError
from stepwell.settings import Settings

__all__ = ["TIER_TYPE", "check", "check_without", "logger", "reported"]

logger = logging.getLogger("vllm.stepwell")  # so that vLLM's handlers print it

TIER_TYPE = "StepwellTier"


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Log a configuration error as one line; vLLM's own report of it is a page long."""
    try:
        yield
    except ConfigError as error:
        logger.error("Stepwell: %s", error)
        raise


def check(extra_config: dict[str, Any]) -> None:
    """Check the settings of every Stepwell tier and that this vLLM fits.

    With ``"if_incompatible": "start_without"`` a vLLM that does not fit loses its Stepwell tiers.

    Args:
        extra_config: ``kv_connector_extra_config``.

    Raises:
        ConfigError: a setting is wrong, or vLLM does not fit.
    """
    tiers = _tiers(extra_config)
    settings = [Settings.parse(_own(tier)) for tier in tiers]
    package = vllm_contract.installed_package()
    if not tiers or package is None:
        return
    cpu = extra_config.get("spec_name") == "StepwellCpuTieringSpec"
    _check_platform(cpu)
    differences = _probe(package, cpu, id(vllm_contract.REQUIREMENTS))
    if not differences:
        return
    _refuse_unless_asked(settings, differences, package)
    extra_config["secondary_tiers"] = [t for t in extra_config["secondary_tiers"] if t not in tiers]


def _check_platform(cpu_spec: bool) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not cpu_spec:
        raise ConfigError(
            'this is vLLM\'s CPU build: let "stepwell vllm-args --cpu" print the configuration: '
            "platform=cpu"
        )
    if cpu_spec and not current_platform.is_cpu():
        raise ConfigError(
            'this vLLM has a device: let "stepwell vllm-args" print the configuration, without '
            f"--cpu: platform={current_platform.device_type}"
        )


def check_without(extra_config: Mapping[str, Any], error: str) -> None:
    """Check the settings on a vLLM that lacks what Stepwell must import.

    Args:
        extra_config: ``kv_connector_extra_config``.
        error: what could not be imported.

    Raises:
        ConfigError: a setting is wrong, or the settings do not say to start without Stepwell.
    """
    settings = [Settings.parse(_own(tier)) for tier in _tiers(extra_config)]
    package = vllm_contract.installed_package()
    differences = list(vllm_contract.probe(package)) if package else []
    missing = Difference("vLLM's tiered offloading", "to be there", error)
    _refuse_unless_asked(settings, differences or [missing], package)


def _refuse_unless_asked(
    settings: list[Settings], differences: list[Difference], package: Path | None
) -> None:
    words = "; ".join(str(difference) for difference in differences)
    version = vllm_contract.version_of(package) if package else "none"
    fits = f"vllm={version} stepwell={stepwell.__version__}"
    if any(s.if_incompatible != "start_without" for s in settings):
        raise ConfigError(
            f'this vLLM is not what Stepwell was written for ({words}); "if_incompatible": '
            f'"start_without" would start the engine without Stepwell: {fits}'
        )
    logger.error(
        "Stepwell: starting WITHOUT Stepwell, as if_incompatible says: %s: %s", words, fits
    )


@functools.cache
def _probe(package: Path, cpu: bool, requirements: int) -> list[Difference]:
    # Asked three times per start. ``requirements`` only tells tests' changes of them apart.
    return vllm_contract.probe(package, cpu=cpu)


def _tiers(extra_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [t for t in extra_config.get("secondary_tiers", ()) if t.get("type") == TIER_TYPE]


def _own(tier_config: Mapping[str, Any]) -> dict[str, Any]:
    # What vLLM itself reads from a tier's configuration is not for us.
    theirs = ("type", "module_path", "backpressure")
    return {name: value for name, value in tier_config.items() if name not in theirs}
