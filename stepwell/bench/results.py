"""What the demo found, as plain values, and the arithmetic on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.bench.load import LoadResult
from stepwell.bench.prometheus import Metrics, has, total

RECOMPUTE, DISK, DEVICE, VLLM_FS = "recompute", "disk", "device", "vllm-fs"
SOURCES = ("computed", "device", "host", "disk", "shared")

_COMPUTED = "vllm:prompt_tokens_by_source_total"
_CACHED = "vllm:prompt_tokens_cached_by_source_total"
_SERVED = "vllm:stepwell_served_tokens_total"
_MISSED = "vllm:stepwell_missed_tokens_total"
_READ_BYTES = "vllm:stepwell_read_bytes_total"
_READ_BYTES_ENGINE = "vllm:kv_offload_tiering_read_bytes_total"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Prompt tokens by where their keys and values came from.

    ``shared`` is storage that engines share, which vLLM calls external and leaves at that.
    """

    computed: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.computed + self.device + self.host + self.disk + self.shared

    @property
    def reused(self) -> int:
        return self.total - self.computed


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one concurrency.

    Attributes:
        mode: RECOMPUTE, DISK or a kind of shared storage, DEVICE, or VLLM_FS.
        concurrency: requests in flight.
        ttft_s: time to first token of every session, seconds.
        output_tokens_per_s: output tokens of all sessions by the wall time.
        tokens: prompt tokens by source, from the engine's own counters.
        tokens_asked: prompt tokens that were sent.
        bytes_read: bytes that Stepwell (or the engine's own tier) says it read.
        bytes_read_physical: bytes that the engine's processes had the drive deliver.
        answers_equal: every answer is, token for token, that of recomputation.
        served: of `tokens`, what Stepwell says the tier of this mode served; None in other modes.
        missed: tokens of chunks that Stepwell was asked for and did not serve, by reason; behind
            the first of a prompt nothing more is asked for.
    """

    mode: str
    concurrency: int
    ttft_s: tuple[float, ...]
    output_tokens_per_s: float
    tokens: TokenCounts
    tokens_asked: int
    bytes_read: int
    bytes_read_physical: int
    answers_equal: bool
    served: int | None = None
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def accounted(self) -> bool:
        """Whether the tokens by source add up to the tokens asked, and both accounts agree."""
        agree = self.served is None or self.served == self.tokens.disk + self.tokens.shared
        return agree and self.tokens.total == self.tokens_asked

    def percentile(self, percent: float) -> float:
        """Returns a percentile of the time to first token, seconds."""
        return percentile(self.ttft_s, percent)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The whole demo.

    Attributes:
        model: what was served, in words.
        prompt_tokens: per session.
        sessions: number of distinct sessions.
        rows: one per mode and concurrency.
        configuration: everything else that one needs to repeat it; JSON values.
        kept: the directory that was kept, or None.
        store: the mode that reads from Stepwell.
        left: chunks that are left on shared storage because they cannot be erased there, in words.
    """

    model: str
    prompt_tokens: int
    sessions: int
    rows: tuple[Row, ...]
    configuration: Mapping[str, object]
    kept: str | None = None
    store: str = DISK
    left: str = ""

    @property
    def accounted(self) -> bool:
        return all(row.accounted for row in self.rows)

    @property
    def answers_equal(self) -> bool:
        return all(row.answers_equal for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether all answers were equal and every token was accounted for."""
        return self.accounted and self.answers_equal

    def row(self, mode: str, concurrency: int) -> Row | None:
        """Returns that row, None if it was not measured."""
        for row in self.rows:
            if row.mode == mode and row.concurrency == concurrency:
                return row
        return None

    def speedups(self, mode: str = "") -> dict[int, float]:
        """Returns, by concurrency, how many times sooner the first token came (p50).

        Args:
            mode: by default the one that reads from Stepwell.
        """
        result = {}
        for slow in self.rows:
            fast = self.row(mode or self.store, slow.concurrency)
            if slow.mode == RECOMPUTE and fast is not None:
                result[slow.concurrency] = slow.percentile(50) / fast.percentile(50)
        return result


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile by linear interpolation between the closest ranks.

    Raises:
        ValueError: no values, or `percent` outside 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"no percentile: values={len(values)} percent={percent}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def token_counts(before: Metrics, after: Metrics) -> TokenCounts:
    """Returns the prompt tokens by source between two readings of vLLM's /metrics."""

    def delta(name: str, source: str) -> int:
        labels = {"source": source}
        return round(total(after, name, labels) - total(before, name, labels))

    cached = {source: delta(_CACHED, source) for source in ("device", "host", "disk")}
    return TokenCounts(
        computed=delta(_COMPUTED, "local_compute"),
        shared=delta(_CACHED, "external_unspecified"),
        **cached,
    )


def tokens_served(before: Metrics, after: Metrics, tier: str) -> int:
    """Returns the tokens that Stepwell says a tier served, or all drives of the disk tier."""

    def served(metrics: Metrics) -> float:
        return sum(
            value
            for (name, labels), value in metrics.items()
            if name == _SERVED and dict(labels).get("tier", "").startswith(tier)
        )

    return round(served(after) - served(before))


def tokens_missed(before: Metrics, after: Metrics) -> dict[str, int]:
    """Returns the tokens that Stepwell says no tier served, by reason, those that there are."""
    reasons = sorted({dict(labels).get("reason", "") for name, labels in after if name == _MISSED})
    missed = {}
    for reason in reasons:
        labels = {"reason": reason}
        amount = round(total(after, _MISSED, labels) - total(before, _MISSED, labels))
        if amount:
            missed[reason] = amount
    return missed


def bytes_read(before: Metrics, after: Metrics) -> int:
    """Returns the bytes read from storage tiers between two readings of /metrics.

    Stepwell's own counter if it is there, else what the engine counts for its tiers.
    """
    name = _READ_BYTES if has(after, _READ_BYTES) else _READ_BYTES_ENGINE
    return round(total(after, name) - total(before, name))


def make_row(
    mode: str,
    concurrency: int,
    load: LoadResult,
    reference: Sequence[tuple[int, ...]],
    *,
    tokens: TokenCounts,
    tokens_asked: int,
    bytes_read: int,
    bytes_read_physical: int,
    served: int | None = None,
    missed: Mapping[str, int] | None = None,
) -> Row:
    """Makes the row of one measurement; `reference` holds the answers of recomputation."""
    return Row(
        mode=mode,
        concurrency=concurrency,
        ttft_s=tuple(answer.ttft_s for answer in load.answers),
        output_tokens_per_s=load.num_output_tokens / load.wall_s,
        tokens=tokens,
        tokens_asked=tokens_asked,
        bytes_read=bytes_read,
        bytes_read_physical=bytes_read_physical,
        answers_equal=[answer.token_ids for answer in load.answers] == list(reference),
        served=served,
        missed=missed or {},
    )
