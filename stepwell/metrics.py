"""Counters with labels: the one place where numbers about a running store are kept."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["DEFINITIONS", "GAUGES", "CounterDefinition", "Metrics"]


@dataclass(frozen=True, slots=True)
class CounterDefinition:
    """Name, help text and label names of one counter or gauge."""

    name: str
    documentation: str
    labels: tuple[str, ...]


DEFINITIONS: tuple[CounterDefinition, ...] = (
    CounterDefinition(
        "lookups",
        "Chunks that an engine asked for, by answer and reason of a miss.",
        ("answer", "reason"),
    ),
    CounterDefinition("asked_tokens", "Tokens of the chunks that an engine asked for.", ()),
    CounterDefinition(
        "served_tokens",
        "Of those, tokens that a tier served; with missed_tokens they add up to asked_tokens.",
        ("tier",),
    ),
    CounterDefinition("missed_tokens", "Of those, tokens that no tier served.", ("reason",)),
    CounterDefinition(
        "read_chunks",
        "Chunks asked of a tier by reads, by outcome and reason.",
        ("tier", "outcome", "reason"),
    ),
    CounterDefinition("read_bytes", "Payload bytes served by a tier.", ("tier",)),
    CounterDefinition(
        "write_chunks",
        "Chunks offered to a tier, by outcome and reason.",
        ("tier", "outcome", "reason"),
    ),
    CounterDefinition("write_bytes", "Payload bytes taken by a tier.", ("tier",)),
    CounterDefinition(
        "joined_reads", "Chunks served by a read that another job had begun.", ("tier",)
    ),
    CounterDefinition(
        "evicted_chunks", "Chunks that left a tier to make room, by reason.", ("tier", "reason")
    ),
    CounterDefinition(
        "demoted_chunks",
        "Chunks copied from the uppermost tier to lower ones, by outcome and reason.",
        ("outcome", "reason"),
    ),
    CounterDefinition(
        "quarantined_chunks",
        "Records set aside because they were wrong, by reason.",
        ("tier", "reason"),
    ),
    CounterDefinition(
        "internal_errors", "Exceptions caught at a seam so that the engine goes on.", ("where",)
    ),
)

GAUGES: tuple[CounterDefinition, ...] = (
    CounterDefinition("used_bytes", "Bytes that the records of a tier take.", ("tier",)),
    CounterDefinition(
        "allocated_bytes", "Bytes that a drive's extents take, free slots included.", ("tier",)
    ),
    CounterDefinition(
        "written_bytes", "Bytes written to a drive since its store was made.", ("tier",)
    ),
    CounterDefinition(
        "write_pressure",
        "How scarce writing is by a drive's endurance: 0, not at all, to 1, not to be done.",
        ("tier",),
    ),
    CounterDefinition(
        "breaker_open", "1 while a drive is not asked because it failed or was slow.", ("tier",)
    ),
)
"""What has a present value rather than a sum."""

_LABELS: Mapping[str, tuple[str, ...]] = {d.name: d.labels for d in DEFINITIONS}


class Metrics:
    """A table of counters.

    Threading: any thread may call any method. Cost: one lock per call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], int] = {}

    def add(self, name: str, labels: tuple[str, ...], amount: int = 1) -> None:
        """Increase counter ``name``, which `DEFINITIONS` must list, by ``amount`` >= 0."""
        if len(_LABELS[name]) != len(labels):
            raise ValueError(f"wrong labels: counter={name} labels={labels}")
        key = (name, tuple(map(str, labels)))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def value(self, name: str, **labels: str) -> int:
        """Sum of counter ``name`` over every series that carries the given labels."""
        names = _LABELS[name]
        wanted = [(names.index(label), value) for label, value in labels.items()]
        with self._lock:
            return sum(
                amount
                for (series, values), amount in self._values.items()
                if series == name and all(values[i] == value for i, value in wanted)
            )

    def snapshot(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """A copy of every series."""
        with self._lock:
            return dict(self._values)

    def __iter__(self) -> Iterator[tuple[str, dict[str, str], int]]:
        """Every series as (name, labels, value), sorted."""
        for (name, values), amount in sorted(self.snapshot().items()):
            yield name, dict(zip(_LABELS[name], values, strict=True)), amount
