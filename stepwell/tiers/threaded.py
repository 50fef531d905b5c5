"""What the tiers with threads of their own have in common: a runner of jobs."""

from stepwell.core.types import Job, JobResult
from stepwell.tiers.jobs import JobRunner

__all__ = ["ThreadedTier"]


class ThreadedTier:
    """The part of a tier that hands its jobs to a `stepwell.tiers.jobs.JobRunner`.

    A subclass sets ``_runner`` when everything else is ready, since its threads begin at once.
    """

    _runner: JobRunner

    def submit(self, job: Job) -> None:
        """See `stepwell.tiers.base.Tier.submit`."""
        self._runner.submit(job)

    def poll(self) -> list[JobResult]:
        """See `stepwell.tiers.base.Tier.poll`."""
        return self._runner.poll()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is running; False if that took longer than ``timeout_s``."""
        return self._runner.drain(timeout_s)

    @property
    def queued_read_bytes(self) -> int:
        """Bytes of reads that wait for a thread."""
        return self._runner.queued_read_bytes

    @property
    def under_way(self) -> list[tuple[int, float]]:
        """The operations that are running now: of which job, -1 for none, and since when."""
        return self._runner.under_way
