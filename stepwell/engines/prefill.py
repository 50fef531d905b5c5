"""How fast an engine computes prompts, seen from its scheduler."""

from collections import deque
from dataclasses import dataclass

from stepwell.policy.worth import PrefillRate

__all__ = ["StepTimer"]

# A step with fewer prompt tokens, or with a larger part of others, says little about prefill.
_MIN_TOKENS = 64
_MIN_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class _Step:
    scheduled_s: float
    prompt_tokens: int
    all_tokens: int


class StepTimer:
    """Times steps from their scheduling to their outputs.

    A step runs from its scheduling, or from the outputs of the step before it where that came
    later, to its own outputs; engines that schedule ahead are timed rightly that way.

    Threading: none; the scheduler's thread. Cost: O(1).

    Args:
        empty_steps_have_outputs: whether outputs come also for a step without tokens, as there is
            while every request waits for a load.
    """

    def __init__(self, *, empty_steps_have_outputs: bool = True) -> None:
        self.rate = PrefillRate()
        self._empty_steps_count = empty_steps_have_outputs
        # Engines schedule as many steps ahead as they have pipeline stages; should outputs ever
        # be missed, then no more than that are waited for.
        self._steps: deque[_Step] = deque(maxlen=8)
        self._last_output_s = 0.0

    def on_scheduled(self, prompt_tokens: int, all_tokens: int, now_s: float) -> None:
        """A step was scheduled.

        Args:
            prompt_tokens: of prompts, that it will compute.
            all_tokens: that it will compute, those included.
            now_s: monotonic seconds.
        """
        if all_tokens or self._empty_steps_count:
            self._steps.append(_Step(now_s, prompt_tokens, all_tokens))

    def on_outputs(self, now_s: float) -> None:
        """The outputs of the oldest step that has none yet are there."""
        if not self._steps:
            return
        step = self._steps.popleft()
        elapsed_s = now_s - max(step.scheduled_s, self._last_output_s)
        self._last_output_s = now_s
        if step.prompt_tokens >= max(_MIN_TOKENS, _MIN_SHARE * step.all_tokens):
            self.rate.on_prefilled(step.prompt_tokens, elapsed_s)
