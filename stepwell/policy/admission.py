"""Which chunks may enter a tier.

A chunk is of no use without those before it, so what a policy refuses has to be the end of
a prefix: a chunk behind a gap can never be read, and writing it only wears the drive. This is why
pressure works by position and not by lot, and why exploring takes whole prompts. On the Mooncake
conversation trace, with room for 20,000 of its 182,790 chunks and `always` at a pressure of 0.25,
the hit ratio is 0.267 with 97,000 chunks written. By lot it is 0.193 with 115,000. Without
pressure it is 0.288 with 205,000.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "ADMISSION_NAMES",
    "Admission",
    "AlwaysAdmit",
    "EXPLORE_S",
    "EXPLORE_SHARE",
    "HALF_LIFE_S",
    "HEAD_TOKENS",
    "MIN_REUSE",
    "PRIOR_OUTCOMES",
    "ReuseProbability",
    "SecondDemotion",
    "make_admission",
]

DEFAULT_NUM_TAGS = 1 << 17
"""About 24 MB. Better is the number of chunks that fit in the tier."""

HEAD_TOKENS = 8192
"""How much of a prompt is written at half strictness: of the order of what agents share (tools and
system prompt, a median of 15k tokens) and of whole conversations (a mean of 12k), both from
docs/SOURCES.md S1, S2. It only sets the scale: the pressure settles where the budget is met."""

MIN_REUSE = 0.2
"""What wear costs over what computing costs: writing a chunk pays if it is read with at least this
probability. 0.21 for Llama-70B on 8 H100; 0.03 for DeepSeek-V3 to 0.94 for Llama-8B
(docs/SOURCES.md S7)."""

HALF_LIFE_S = 3600.0
"""An outcome counts half after an hour. Traffic changes by the time of day; the gaps between two
uses are minutes (p99 of 1.6k to 1.8k s, docs/SOURCES.md S1, S2)."""

PRIOR_OUTCOMES = 16.0
"""How many good outcomes a class that nothing is known of is credited with."""

EXPLORE_SHARE = 1 / 32
EXPLORE_S = 60.0
"""A share of all stretches of this length explores: long enough for prompts to come through."""


class Admission(Protocol):
    """Whether a chunk may enter a tier: a decision that remembers.

    Offer every chunk that would be written, in prefix order, and do not offer what the tier has.
    If one is refused, those behind it in the same prefix are of no use yet; they may be left
    unwritten, but should be offered all the same, so that they are remembered.

    Threading: none; the owner locks. Cost: O(1) per call. Memory: bounded at construction.
    Determinism: the same calls give the same answers. Of two objects with the same history the
        one that is asked with the higher pressure never admits what the other refuses.
    """

    @property
    def name(self) -> str:
        """What settings and reports call it."""
        ...

    def admit(self, tag: int, end_token: int, pressure: float, now_s: float) -> bool:
        """Whether to write a chunk that is offered. Asking is offering: it is remembered.

        Args:
            tag: a fingerprint of the chunk's key, evenly distributed, 60 bits.
            end_token: position of its last token + 1 in the prompt, 0 if unknown.
            pressure: how scarce writing is, 0 (not at all) to 1 (nothing is admitted).
            now_s: monotonic seconds.
        """
        ...

    def on_read(self, tag: int, now_s: float) -> None:
        """The chunk was asked for and served."""
        ...

    def on_evicted(self, tag: int, now_s: float) -> None:
        """The chunk left the tier; also if it was admitted and could not be written."""
        ...


class AlwaysAdmit:
    """Everything, unless writing is scarce.

    For operators: with rising pressure less and less of a prompt is written when it is first
    seen, only its beginning, and all of it when it is seen again; from half pressure on nothing is
    written when first seen, and less and less when seen again, until at full pressure nothing is.

    Args:
        num_tags: how many offers are remembered, >= 1.
    """

    name = "always"

    def __init__(self, num_tags: int = DEFAULT_NUM_TAGS) -> None:
        self._offered = _Ghost(num_tags)

    def admit(self, tag: int, end_token: int, pressure: float, now_s: float) -> bool:
        """See `Admission`."""
        # Offers are remembered even without pressure, so that it finds a memory when it comes.
        again = self._offered.offer(tag)
        if _within_head(tag, end_token, 2 * pressure):
            return True
        return again and _within_head(tag, end_token, 2 * pressure - 1)

    def on_read(self, tag: int, now_s: float) -> None:
        """What is used stays remembered."""
        self._offered.refresh(tag)

    def on_evicted(self, tag: int, now_s: float) -> None:
        """Nothing to learn."""


class SecondDemotion:
    """What is offered for the second time.

    A chunk's first offer is remembered, and it is admitted when it is offered again while it is:
    0.85 reads per chunk written instead of 0.39 in conversations (docs/SOURCES.md S6).

    For operators: a chunk is written when it is offered a second time. With rising pressure only
    the beginning of a prompt is, less and less of it, until at full pressure nothing is.

    Args:
        num_tags: how many offers are remembered, >= 1.
    """

    name = "second-demotion"

    def __init__(self, num_tags: int = DEFAULT_NUM_TAGS) -> None:
        self._offered = _Ghost(num_tags)

    def admit(self, tag: int, end_token: int, pressure: float, now_s: float) -> bool:
        """See `Admission`."""
        return self._offered.offer(tag) and _within_head(tag, end_token, pressure)

    def on_read(self, tag: int, now_s: float) -> None:
        """What is used stays remembered."""
        self._offered.refresh(tag)

    def on_evicted(self, tag: int, now_s: float) -> None:
        """Nothing to learn."""


class ReuseProbability:
    """What is probably read again before it leaves.

    Chunks are classed by the power of two above their position. A chunk that was offered ends
    well if it is read, or, having been refused, offered again; it ends badly if it is evicted
    unread, or if ``num_tags`` others were offered meanwhile. The share of good endings is the
    class's estimate. So refused classes go on being measured, without a byte written.

    A class counts as its best deeper neighbour if that is better: whoever reads a chunk reads all
    those before it.

    For operators: a class of chunks, by depth in the prompt, is written while at least
    ``min_reuse`` of it, or of a deeper class, is used again; pressure raises that towards all of
    it, and at full pressure nothing is written. About one minute in 32 everything is
    written, so that a class can show that it has become worth it.

    Args:
        num_tags: how many offers are followed at a time, >= 1.
        min_reuse: the least probability that is worth a write, 0 to 1.
        explore_share: the part of time in which everything is admitted, 0 to 1. Needed because
            offers are remembered for a shorter time than a large tier keeps chunks.
    """

    name = "reuse-probability"

    def __init__(
        self,
        num_tags: int = DEFAULT_NUM_TAGS,
        *,
        min_reuse: float = MIN_REUSE,
        explore_share: float = EXPLORE_SHARE,
    ) -> None:
        if not 0 <= min_reuse <= 1 or not 0 <= explore_share <= 1:
            raise ValueError(f"0 to 1 each: min_reuse={min_reuse} explore_share={explore_share}")
        self._min_reuse = min_reuse
        self._explore_share = explore_share
        self._followed = _Ghost(num_tags)
        self._classes: dict[int, _Class] = {}

    def admit(self, tag: int, end_token: int, pressure: float, now_s: float) -> bool:
        """See `Admission`."""
        self._end(tag, now_s, good=True)
        chunk_class = end_token.bit_length()
        self._class(chunk_class, now_s).offered_s = now_s
        lost = self._followed.follow(tag, chunk_class)
        if lost is not None:
            self._class(lost, now_s).add(now_s, good=False)
        if pressure >= 1:
            return False
        if _unit(int(now_s // EXPLORE_S)) < self._explore_share * (1 - pressure):
            return True
        threshold = self._min_reuse + (1 - self._min_reuse) * max(0.0, pressure)
        return self.estimate(end_token, now_s) >= threshold

    def on_read(self, tag: int, now_s: float) -> None:
        """A good ending, if it is the first read."""
        self._end(tag, now_s, good=True)

    def on_evicted(self, tag: int, now_s: float) -> None:
        """A bad ending, if it was never read."""
        self._end(tag, now_s, good=False)

    def estimate(self, end_token: int, now_s: float) -> float:
        """P(a chunk at this position is read again before it leaves), 0 to 1; 1 if unknown."""
        own = end_token.bit_length()
        best = self._classes[own].estimate(now_s) if own in self._classes else 1.0
        if own == 0:
            return best  # unknown positions are neither before nor behind others
        for chunk_class, each in self._classes.items():
            if chunk_class > own and now_s - each.offered_s < HALF_LIFE_S:
                best = max(best, each.estimate(now_s))
        return best

    def _end(self, tag: int, now_s: float, *, good: bool) -> None:
        chunk_class = self._followed.pop(tag)
        if chunk_class is not None:
            self._class(chunk_class, now_s).add(now_s, good=good)

    def _class(self, chunk_class: int, now_s: float) -> "_Class":
        return self._classes.setdefault(chunk_class, _Class(now_s, now_s))


ADMISSION_NAMES = ("always", "reuse-probability", "second-demotion")


def make_admission(name: str, num_tags: int = DEFAULT_NUM_TAGS) -> Admission:
    """The policy of that name.

    Args:
        name: one of `ADMISSION_NAMES`.
        num_tags: how many offers it remembers, about 180 bytes each; best the number of chunks
            that fit in the tier.

    Raises:
        ValueError: no such policy.
    """
    for policy in (AlwaysAdmit, ReuseProbability, SecondDemotion):
        if policy.name == name:
            return policy(num_tags)
    raise ValueError(f"one of {', '.join(ADMISSION_NAMES)}: admission={name}")


@dataclass(slots=True)
class _Class:
    """How the chunks of one class ended; older endings count less.

    Attributes:
        as_of_s: up to when the two sums are discounted.
        offered_s: when a chunk of it was last offered.
    """

    as_of_s: float
    offered_s: float
    num_good: float = 0.0
    num_bad: float = 0.0

    def add(self, now_s: float, *, good: bool) -> None:
        kept = self._kept(now_s)
        self.num_good = self.num_good * kept + good
        self.num_bad = self.num_bad * kept + (not good)
        self.as_of_s = now_s

    def estimate(self, now_s: float) -> float:
        # Without news the credit outweighs what was seen, so a class is not refused for ever.
        kept = self._kept(now_s)
        good = PRIOR_OUTCOMES + self.num_good * kept
        return good / (good + self.num_bad * kept)

    def _kept(self, now_s: float) -> float:
        return float(0.5 ** ((now_s - self.as_of_s) / HALF_LIFE_S))


class _Ghost:
    """The last ``num_tags`` tags that were offered, with a number for each, and no content."""

    def __init__(self, num_tags: int) -> None:
        if num_tags < 1:
            raise ValueError(f"at least 1: num_tags={num_tags}")
        self._num_tags = num_tags
        self._tags: OrderedDict[int, int] = OrderedDict()

    def offer(self, tag: int) -> bool:
        """Remember a tag as the latest one; says whether it was remembered already."""
        known = tag in self._tags
        self.follow(tag, 0)
        return known

    def follow(self, tag: int, number: int) -> int | None:
        """Remember a tag as the latest one; returns the number of the one forgotten for it."""
        self._tags[tag] = number
        self._tags.move_to_end(tag)
        if len(self._tags) > self._num_tags:
            return self._tags.popitem(last=False)[1]
        return None

    def refresh(self, tag: int) -> None:
        """Make a tag the latest one if it is remembered."""
        if tag in self._tags:
            self._tags.move_to_end(tag)

    def pop(self, tag: int) -> int | None:
        """Forget a tag; returns its number if it was remembered."""
        return self._tags.pop(tag, None)


def _within_head(tag: int, end_token: int, strictness: float) -> bool:
    """Whether a chunk lies in the part of its prompt that is written.

    Everything at strictness 0, the first `HEAD_TOKENS` at 0.5, nothing at 1; where the position
    is unknown a share of 1 - strictness, chosen by tag. Monotone in strictness and in position.
    """
    if strictness <= 0:
        return True
    if strictness >= 1:
        return False
    if end_token == 0:
        return _unit(tag) >= strictness
    return end_token * strictness <= HEAD_TOKENS * (1 - strictness)


def _unit(number: int) -> float:
    """A number in [0, 1) that looks drawn by lot and is always the same for the same ``number``.

    The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), so that it does not matter
    what else a tag's bits are used for.
    """
    mask = (1 << 64) - 1
    number = (number + 0x9E3779B97F4A7C15) & mask
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return ((number ^ (number >> 31)) >> 11) / (1 << 53)
