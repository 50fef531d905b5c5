"""The counters of an engine that runs, read from where it exports them."""

import urllib.error
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from stepwell.errors import ConfigError
from stepwell.exporter import PREFIX
from stepwell.settings import parse_target
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.files import read_regular

__all__ = ["LiveCounters", "read_live"]

_TIMEOUT_S = 2.0
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LiveCounters:
    """What an engine exports.

    Attributes:
        target: where it was read, as in the setting ``metrics``.
        error: why it could not be read; empty if it could.
        values: (name, labels) -> value; names without prefix and without "_total".
    """

    target: str
    error: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's values summed by one label."""
        found: dict[str, float] = {}
        for (series, labels), value in self.values.items():
            if series == name:
                key = dict(labels).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return {key: found[key] for key in sorted(found)}

    def total(self, name: str) -> float:
        """A metric's sum over all labels."""
        return sum(value for (series, _), value in self.values.items() if series == name)


def read_live(directory: StoreDirectory) -> LiveCounters | None:
    """The counters of the process that owns a store; None if it exports none, or nobody owns it.

    Blocks for two seconds at most.
    """
    target = directory.metrics_target()
    if not target:
        return None
    try:
        where = parse_target(target)
        text = _read_file(where) if isinstance(where, str) else _read_address(*where)
        values = {
            (sample.name.removeprefix(PREFIX).removesuffix("_total"), _sorted(sample.labels)): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        }
    except (OSError, ValueError, ConfigError, urllib.error.URLError) as error:
        return LiveCounters(target, str(error) or type(error).__name__, {})
    return LiveCounters(target, "", values)


def _read_file(path: str) -> str:
    return read_regular(path, _MOST_BYTES).decode("utf-8")


def _read_address(host: str, port: int) -> str:
    # An engine that listens on every interface is asked on this machine's own.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{reachable}]" if ":" in reachable else reachable
    # Never through a proxy: it is this machine that is asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{shown}:{port}/metrics", timeout=_TIMEOUT_S) as answer:
        text: str = answer.read(_MOST_BYTES).decode("utf-8")
    return text


def _sorted(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))
