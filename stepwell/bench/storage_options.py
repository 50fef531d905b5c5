"""What `stepwell bench storage` is asked to measure, and what that means in chunks and jobs."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.bench import machine
from stepwell.core.record import PAGE_BYTES, record_bytes
from stepwell.errors import ConfigError
from stepwell.settings import format_bytes, parse_size

__all__ = ["Shape", "StorageOptions", "check_memory", "shapes_of"]

_SLOT_BYTES = 512  # what the disk tier keeps about a record, beside it
_MEMORY_SHARE = 0.9  # of the memory available that the buffers may take


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """What to measure; texts as people write them.

    Attributes:
        paths: existing absolute directories, one per drive; a new folder is made in each and
            removed at the end. None at all is the current directory. Or one URL of storage that
            engines share.
        chunks: sizes of a chunk, one measurement each.
        jobs: in flight at the tier, at least 1.
        chunks_per_job: None is as many as make `jobs` jobs of `size`: one burst.
        size: what a round moves; memory of that size is taken as well. "" is 4GiB of drives, and
            512MiB of a URL.
        rounds: after the first fill, at least 1.
        threads: of the tier.
        small_pages: buffers in pages of 4 KiB, instead of huge ones where the system has them.
    """

    paths: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ("2MiB", "8MiB")
    jobs: int = 16
    chunks_per_job: int | None = None
    size: str = ""
    rounds: int = 3
    threads: int = 8
    small_pages: bool = False

    @property
    def has_url(self) -> bool:
        """Whether a URL is to be measured, and not drives."""
        return any("://" in path and not path.startswith("file:") for path in self.paths)

    @property
    def size_bytes(self) -> int:
        """What a round moves.

        Raises:
            ConfigError: it is no size.
        """
        return parse_size(self.size or ("512MiB" if self.has_url else "4GiB"), "size")


@dataclass(frozen=True, slots=True)
class Shape:
    """What one chunk size means: all of it is whole jobs."""

    chunk_bytes: int
    chunks_per_job: int
    num_chunks: int

    @property
    def capacity_bytes(self) -> int:
        """Of a disk tier that holds one round and nothing more."""
        return self.num_chunks * (record_bytes(self.chunk_bytes) + _SLOT_BYTES)

    @property
    def room_bytes(self) -> int:
        """On all drives together, for raw file, tier and files."""
        return 2 * self.num_chunks * self.chunk_bytes + self.capacity_bytes


def shapes_of(options: StorageOptions) -> tuple[Shape, ...]:
    """The shape of each chunk size, of numbers that are right.

    Raises:
        ConfigError: one line that says what to change.
    """
    numbers = {
        "jobs": options.jobs,
        "rounds": options.rounds,
        "threads": options.threads,
        "chunks_per_job": 1 if options.chunks_per_job is None else options.chunks_per_job,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1: {name}={value}")
    if options.threads > 256:
        raise ConfigError(f"threads is 1 to 256: threads={options.threads}")
    shapes = tuple(_shape(options, chunk) for chunk in options.chunks)
    sizes = [shape.chunk_bytes for shape in shapes]
    if not shapes or len(set(sizes)) < len(sizes):
        raise ConfigError(f"chunk sizes must be distinct: chunk={','.join(options.chunks)}")
    return shapes


def check_memory(shapes: Sequence[Shape], options: StorageOptions) -> None:
    """Check that the buffers fit.

    Raises:
        ConfigError: they do not.
    """
    needed_bytes = max(shape.num_chunks * shape.chunk_bytes for shape in shapes)
    available_bytes = machine.memory_available()
    if available_bytes and needed_bytes > available_bytes * _MEMORY_SHARE:
        raise ConfigError(
            f"not enough memory for buffers of that size; give a smaller --size: "
            f"size={format_bytes(options.size_bytes)} available={format_bytes(available_bytes)}"
        )


def _shape(options: StorageOptions, chunk: str) -> Shape:
    size_bytes = options.size_bytes
    chunk_bytes = parse_size(chunk, "chunk", unit="MiB")
    if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ConfigError(f"chunk is a multiple of 4096 bytes, at least one: chunk={chunk!r}")
    least_bytes = options.jobs * (options.chunks_per_job or 1) * chunk_bytes
    if size_bytes < least_bytes:
        factors = "jobs x chunks-per-job x chunk" if options.chunks_per_job else "jobs x chunk"
        raise ConfigError(
            f"size is at least {factors}, {format_bytes(least_bytes)}: "
            f"size={format_bytes(size_bytes)} jobs={options.jobs} chunk={chunk}"
        )
    chunks_per_job = options.chunks_per_job or size_bytes // (options.jobs * chunk_bytes)
    num_jobs = size_bytes // (chunks_per_job * chunk_bytes)
    if options.chunks_per_job is None:
        num_jobs = options.jobs  # the division may leave room for one more
    return Shape(chunk_bytes, chunks_per_job, num_jobs * chunks_per_job)
