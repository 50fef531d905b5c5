"""The value for vLLM's --kv-transfer-config."""

from collections.abc import Mapping, Sequence

from stepwell.errors import ConfigError
from stepwell.settings import Settings, parse_size
from stepwell.tiers.media.kinds import kind_of, open_medium
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["kv_transfer_config", "unchecked"]

MODULE = "stepwell.engines.vllm"
CPU_MODULE = "stepwell.engines.vllm_cpu"


def kv_transfer_config(
    path: str | Sequence[str] = (),
    capacity: str = "",
    *,
    url: str = "",
    primary: str = "4GiB",
    cpu: bool = False,
    settings: dict[str, object] | None = None,
) -> dict[str, object]:
    """What to give to vLLM, checked.

    Args:
        path: directory of the disk tier; several, one per drive, make a striped tier. None at all
            with a ``url``.
        capacity: its size, such as "20GiB".
        url: storage that engines share, such as "redis://host"; below the disk tier if there is
            one.
        primary: host memory that vLLM copies through, such as "4GiB"; a burst of loads that does
            not fit in it is recomputed.
        cpu: for vLLM's CPU backend, which has no offloading of its own.
        settings: further settings of the tier, by the names of `Settings.parse`.

    Raises:
        ConfigError: a value is wrong, or could not be meant.
    """
    paths = [path] if isinstance(path, str) else list(path)
    tier: dict[str, object] = {"path": paths[0]} if len(paths) == 1 else {"paths": paths}
    given = {"paths": tier.pop("paths", ()), "capacity": capacity, "url": url}
    tier |= {name: value for name, value in given.items() if value}
    tier |= settings or {}
    _check(Settings.parse(tier), tier)
    primary_bytes = parse_size(primary, "primary")
    if primary_bytes < 1 << 20:
        raise ConfigError(f"primary is at least 1MiB: primary={primary!r}")
    spec: dict[str, object] = {"spec_name": "TieringOffloadingSpec"}
    if cpu:
        spec = {"spec_name": "StepwellCpuTieringSpec", "spec_module_path": CPU_MODULE}
    return {
        "kv_connector": "StepwellConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        # A failed read never gets as far as this policy: the tier answers with a miss and vLLM
        # computes. Should vLLM itself fail to load, it is to compute as well.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **spec,
            "cpu_bytes_to_use": primary_bytes,
            "secondary_tiers": [{"type": "StepwellTier", "module_path": MODULE, **tier}],
        },
    }


def unchecked(url: str) -> str:
    """What of a url could not be checked here, in words; "" for nothing."""
    kind = kind_of(MediumUrl.parse(url)) if url else None
    if kind is None or kind.installed:
        return ""
    return (
        f"the url is checked where the engine starts, since {' and '.join(kind.missing)} is not "
        f"installed here; {kind.install_command}"
    )


def _check(settings: Settings, tier: Mapping[str, object]) -> None:
    """Raises ConfigError for what has the right form and cannot be meant."""
    if settings.url:
        url = MediumUrl.parse(settings.url)
        if kind_of(url).installed:  # it need not be where the configuration is written
            open_medium(url, settings.slow_after_s).close()
    for path in settings.paths:
        if len(path.parts) < 2:
            raise ConfigError(
                f"path is the root of the file system; give a directory for the store: path={path}"
            )
    if "weights_id" in tier and not settings.weights_id.strip():
        raise ConfigError(
            "weights_id is a text that changes with the weights; leave it out to have their "
            f"fingerprint: weights_id={settings.weights_id!r}"
        )
