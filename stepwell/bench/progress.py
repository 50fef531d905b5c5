"""One progress bar on stderr, shown only where stderr is a terminal."""

import threading
from types import TracebackType
from typing import Self

from tqdm import tqdm

_REFRESH_S = 1.0


class Progress:
    """A bar over all steps of a job, with the name of the current phase.

    Threading: a daemon thread redraws the bar, so that its clock moves in long phases.

    Args:
        total: number of steps.
    """

    def __init__(self, total: int) -> None:
        self._bar = tqdm(
            total=total,
            disable=None,
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc:<34} |{bar}| {n_fmt}/{total_fmt} [{elapsed}]",
        )
        self._closed = threading.Event()
        self._clock = threading.Thread(target=self._redraw, daemon=True)

    def __enter__(self) -> Self:
        if not self._bar.disable:
            self._clock.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        if self._clock.is_alive():
            self._clock.join()
        self._bar.close()

    def phase(self, name: str) -> None:
        """Names what goes on from now."""
        self._bar.set_description_str(name)

    def step(self) -> None:
        """Counts one step."""
        self._bar.update(1)

    def _redraw(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            self._bar.refresh()
