"""Reading the Prometheus text format: just enough for counters and gauges."""

import re
from collections.abc import Mapping

Labels = frozenset[tuple[str, str]]
Metrics = dict[tuple[str, Labels], float]

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> Metrics:
    """Parses an exposition; lines that are no samples are skipped.

    Returns:
        {(name, labels): value}, labels as a frozenset of (name, value) pairs.
    """
    metrics: Metrics = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if match is None:  # comments, blank lines
            continue
        name, labels, value = match.groups()
        pairs = frozenset((key, _unescape(val)) for key, val in _LABEL.findall(labels or ""))
        try:
            metrics[name, pairs] = float(value)
        except ValueError:
            continue
    return metrics


def has(metrics: Metrics, name: str) -> bool:
    """Returns whether there is any sample of this name."""
    return any(key == name for key, _ in metrics)


def total(metrics: Metrics, name: str, labels: Mapping[str, str] | None = None) -> float:
    """Returns the sum of all samples of `name` that carry `labels`; 0.0 if there are none."""
    wanted = frozenset((labels or {}).items())
    return sum(value for (key, pairs), value in metrics.items() if key == name and wanted <= pairs)


def _unescape(value: str) -> str:
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], value)
