"""The exceptions of Stepwell: a class only where a caller would act differently.

::

    StepwellError
      ConfigError       a setting is wrong; raised only while something is being built
      TierError         a tier failed or timed out; treat as a miss
      DataError         stored bytes are not what they claim to be; treat as a miss, quarantine
      ClosedError       the object was closed

Outcomes of lookups and jobs are values (`stepwell.core.types`), not exceptions.
Messages are one line and end in ``key=value`` pairs.
"""

__all__ = [
    "ClosedError",
    "ConfigError",
    "DataError",
    "StepwellError",
    "TierError",
    "in_one_line",
]


class StepwellError(Exception):
    """Base class of every exception that Stepwell raises on purpose."""


class ConfigError(StepwellError):
    """A setting is wrong. The message says which, why, and what to write instead."""


class TierError(StepwellError):
    """A tier failed or timed out. The caller treats the chunk as a miss."""


class DataError(StepwellError):
    """Stored bytes are not what they claim to be.

    Attributes:
        reason: the `stepwell.core.types.Reason` to count the miss under.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClosedError(StepwellError):
    """The object was closed and takes no more work."""


def in_one_line(error: BaseException) -> str:
    """What an error of somebody else's says; its name if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
