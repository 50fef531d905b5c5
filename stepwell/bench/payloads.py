"""Bytes for a storage benchmark: incompressible, different in every page, cheap to make and check.

One block of random words is made once; each chunk of each generation is that block with one
64-bit mask of its own xored in. That runs at the speed of memory, and neither a compressing nor a
deduplicating drive finds anything in it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.core.memory import aligned_memory
from stepwell.core.record import PAGE_BYTES
from stepwell.core.types import Reason
from stepwell.errors import DataError

__all__ = ["Payloads"]

_SEED = 20_240_229
_WORD_BYTES = 8
_SAMPLE_EVERY_PAGES = 16  # a wrong chunk is wrong in large pieces: a page in 64 KiB finds it


class Payloads:
    """Page-aligned buffers, one per chunk, and what they should hold.

    Args:
        num_chunks: >= 1.
        chunk_bytes: a multiple of 4096.
        huge_pages: whether to ask for huge pages, or to do without.

    Raises:
        ValueError: no chunks, or another length.
    """

    def __init__(self, num_chunks: int, chunk_bytes: int, *, huge_pages: bool = True) -> None:
        if num_chunks < 1 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
            raise ValueError(f"no buffers: num_chunks={num_chunks} chunk_bytes={chunk_bytes}")
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self._memory = aligned_memory(num_chunks * chunk_bytes, huge=huge_pages)
        num_pages = chunk_bytes // PAGE_BYTES
        words = PAGE_BYTES // _WORD_BYTES
        self._chunks = np.frombuffer(self._memory, np.uint64).reshape(num_chunks, num_pages, words)
        raw = np.random.SFC64(_SEED).random_raw(num_pages * words)
        self._base: npt.NDArray[np.uint64] = np.asarray(raw, np.uint64).reshape(num_pages, words)
        self._sample = np.unique([*range(0, num_pages, _SAMPLE_EVERY_PAGES), num_pages - 1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.num_chunks * self.chunk_bytes

    @property
    def memory(self) -> memoryview:
        """All buffers, one behind the other."""
        return self._memory

    def chunk(self, idx: int) -> memoryview:
        """The buffer of one chunk; always the same memory."""
        start = idx * self.chunk_bytes
        return self._memory[start : start + self.chunk_bytes]

    def halves(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """The first and the second half of all the memory, to copy from one to the other."""
        words = self._chunks.reshape(-1)
        return words[: len(words) // 2], words[len(words) // 2 :]

    def fill(self, generation: int) -> None:
        """Put the content of a generation (>= 0) into all buffers."""
        for idx in range(self.num_chunks):
            np.bitwise_xor(self._base, self._mask(generation, idx), out=self._chunks[idx])

    def wipe(self) -> None:
        """Zero what `check` looks at, so that content left from before cannot pass for read."""
        for idx in range(self.num_chunks):
            self._chunks[idx][self._sample] = 0

    def check(self, generation: int, what: str, chunks: Sequence[int] | None = None) -> None:
        """Compare a sample of every buffer, one page in 64 KiB and the last, with its content.

        Args:
            generation: that the buffers should hold.
            what: was read, for the message.
            chunks: indices of the chunks to look at; all of them by default.

        Raises:
            DataError: CHECKSUM; a buffer holds something else.
        """
        wanted = self._base[self._sample]
        for idx in range(self.num_chunks) if chunks is None else chunks:
            mask = self._mask(generation, idx)
            if not np.array_equal(self._chunks[idx][self._sample], wanted ^ mask):
                raise DataError(
                    f"what was read is not what was written: read={what} "
                    f"generation={generation} chunk={idx}",
                    Reason.CHECKSUM,
                )

    def _mask(self, generation: int, idx: int) -> np.uint64:
        return np.uint64(_splitmix64(generation * self.num_chunks + idx))


def _splitmix64(number: int) -> int:
    # Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014).
    limit = (1 << 64) - 1
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & limit
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & limit
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & limit
    return mixed ^ mixed >> 31
