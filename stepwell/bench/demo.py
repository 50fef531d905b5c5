"""`stepwell demo`: a fresh engine gets back what an earlier one knew, measured.

One engine with Stepwell serves long sessions and is stopped. Then the same sessions are asked
again, from a fresh engine that reads them from storage (disk, or whatever is shared), from an
engine without Stepwell
(recompute), and from that engine a second time (device, its own prefix cache). Every answer is
compared with the recomputed one, every prompt token with the engine's own counters.

Runs vLLM's CPU build, in float32: there a reused prefix gives the same answer bit by bit.
"""

import contextlib
import importlib
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.bench import machine, results
from stepwell.bench.load import LoadResult, run_load
from stepwell.bench.model import gemma_model, make_model
from stepwell.bench.progress import Progress
from stepwell.bench.prometheus import Metrics
from stepwell.bench.results import DEVICE, DISK, RECOMPUTE, VLLM_FS, DemoResult, Row, TokenCounts
from stepwell.bench.server import Server, ServerConfig, ServerError
from stepwell.bench.stores import FolderStore, SharedStore, Store, fs_tier_config
from stepwell.bench.text import make_prompt
from stepwell.bench.workplace import check_folder, check_pool, signals_as_exceptions
from stepwell.engines.vllm_args import kv_transfer_config
from stepwell.errors import ConfigError, TierError
from stepwell.settings import Settings, format_bytes
from stepwell.tiers.media.kinds import open_medium
from stepwell.tiers.media.urls import MediumUrl

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_MIN_MODEL_LEN = 8192  # tokens
_MAX_NUM_SEQS = 8
_THREADS = 1
_COUNTERS_TIMEOUT_S = 5.0
_WARM_UP_TOKENS = (16, 1024)  # one short, one that runs every kernel on a large batch
_GEMMA_TERMS = ", under the Gemma terms of use"
_WARM_UP_SEED = 1_000_000  # far from any session's
_URL_WITHIN_S = 10.0

_Stores = dict[str, tuple[Store, Mapping[str, object]]]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to measure.

    Attributes:
        model: None is a small seeded Llama, made locally; "gemma" is Gemma-3-270M from PyPI
            (Gemma terms); anything else is the directory of a model.
        path: directory to work in; a new folder is made in it. None is the user's cache
            directory, which unlike /tmp is a real file system almost everywhere.
        sessions: number of distinct prompts, at least 1.
        concurrencies: requests in flight, one measurement each, 1 to 8.
        prompt_tokens: per session, at least 1.
        max_tokens: output tokens per session, at least 1.
        compare_fs: also measure vLLM's own file-system tier.
        capacity: of Stepwell's disk tier, with unit.
        url: storage that engines share, to be measured in place of the disk tier; what was
            written there is erased at the end.
        keep: leave the working folder (store and logs) for inspection.
        port: of the servers; None is a free one.
    """

    model: str | None = None
    path: str | None = None
    sessions: int = 6
    concurrencies: tuple[int, ...] = (1, 4)
    prompt_tokens: int = 4000
    max_tokens: int = 32
    compare_fs: bool = False
    capacity: str = "20GiB"
    url: str = ""
    keep: bool = False
    port: int | None = None


def run_demo(options: DemoOptions) -> DemoResult:
    """Runs the whole demo; minutes, most of them starting engines and recomputing.

    Raises:
        ConfigError: an option is wrong, or what it needs is missing; nothing was started.
        ServerError: an engine did not start or died; the message holds the end of its log.
    """
    check_options(options)
    with signals_as_exceptions(), Progress(_count_steps(options)) as progress:
        progress.phase("making the model")
        info = _get_model(options)
        _check_fit(options, info)
        progress.step()
        with _working_folder(options) as folder:
            return _Demo(options, info, folder, progress).run()


def check_options(options: DemoOptions) -> None:
    """Checks all that can be checked before anything is made or started.

    Raises:
        ConfigError: one line that says what to change.
    """
    numbers = {
        "sessions": options.sessions,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1: {name}={value}")
    asked = options.concurrencies
    in_range = all(1 <= value <= _MAX_NUM_SEQS for value in asked)
    if not asked or not in_range or len(set(asked)) < len(asked):
        raise ConfigError(
            f"concurrencies must be distinct numbers from 1 to {_MAX_NUM_SEQS}: "
            f"concurrencies={','.join(map(str, asked))}"
        )
    if options.path is not None:
        check_folder(Path(options.path))
    if options.model not in (None, "gemma"):
        machine.read_model(Path(options.model or ""))
    if options.url:
        _check_url(options)
    else:
        kv_transfer_config(str(_parent_folder(options)), options.capacity, cpu=True)
        _check_capacity(options)
    if machine.vllm_version() is None or not sys.platform.startswith("linux"):
        raise ConfigError(
            'the demo runs vLLM\'s CPU build on Linux; "make demo" in a checkout installs it: '
            f"vllm={machine.vllm_version()} platform={sys.platform}"
        )


class _Demo:
    """One run: the prompts, the engines one after another, the rows."""

    def __init__(
        self, options: DemoOptions, info: machine.ModelInfo, folder: Path, progress: Progress
    ) -> None:
        self._options = options
        self._info = info
        self._folder = folder
        self._progress = progress
        self._encode = _load_tokenizer(info.folder)
        self._prompts = [self._prompt(seed + 1) for seed in range(options.sessions)]
        self._reference: list[tuple[int, ...]] = []
        self._num_engines = 0
        self._rows: list[Row] = []

    def run(self) -> DemoResult:
        options = self._options
        if options.url:
            shared = SharedStore(options.url)
            return self._with_stores({shared.tier: (shared, self._shared_config(shared))}, shared)
        root = self._folder / "stepwell"
        config = self._disk_config(root)
        stores: _Stores = {DISK: (FolderStore(root, DISK), config)}
        if options.compare_fs:
            root = self._folder / "vllm-fs"
            stores[VLLM_FS] = (FolderStore(root, ""), fs_tier_config(config, root))
        return self._with_stores(stores, None)

    def _with_stores(self, stores: _Stores, shared: SharedStore | None) -> DemoResult:
        try:
            self._measure_all(stores)
        except BaseException:  # counted by whoever asked; nothing is to stay that we can remove
            if left := self._erase(shared):
                logger.warning("%s", left)
            raise
        left = self._erase(shared)
        return self._result(next(iter(stores)), left)

    def _erase(self, shared: SharedStore | None) -> str:
        """See `SharedStore.erase`; "" without one."""
        if shared is None:
            return ""
        self._progress.phase("erasing")
        return shared.erase()

    def _measure_all(self, stores: _Stores) -> None:
        for mode, (store, transfer_config) in stores.items():
            self._write(mode, store, transfer_config)
        self._measure_recompute()
        for concurrency in self._options.concurrencies:
            for mode, (store, transfer_config) in stores.items():
                self._measure_store(mode, store, transfer_config, concurrency)

    def _result(self, store_mode: str, left: str) -> DemoResult:
        options = self._options
        order = {concurrency: idx for idx, concurrency in enumerate(options.concurrencies)}
        modes = (RECOMPUTE, store_mode, DEVICE, VLLM_FS)
        rows = sorted(self._rows, key=lambda r: (modes.index(r.mode), order[r.concurrency]))
        return DemoResult(
            model=self._info.words + (_GEMMA_TERMS if options.model == "gemma" else ""),
            prompt_tokens=options.prompt_tokens,
            sessions=options.sessions,
            rows=tuple(rows),
            configuration=self._configuration(),
            kept=str(self._folder) if options.keep else None,
            store=store_mode,
            left=left,
        )

    def _write(self, mode: str, store: Store, transfer_config: Mapping[str, object]) -> None:
        """Lets one engine serve all sessions and write them down, then stops it."""
        with self._engine(f"{mode}-write", transfer_config, store) as server:
            before = store.written_bytes()
            self._ask(server, f"writing {len(self._prompts)} sessions ({mode})", 1)
            self._rest(mode, store)
            if store.written_bytes() <= before:
                raise ServerError(f"the engine wrote nothing: mode={mode}\n{server.log_tail()}")

    def _measure_recompute(self) -> None:
        """One engine without Stepwell: computes all sessions, then has them on the device."""
        with self._engine(RECOMPUTE, None, None) as server:
            for concurrency in self._options.concurrencies:
                server.reset_prefix_cache()
                self._measure(server, RECOMPUTE, concurrency)
                self._measure(server, DEVICE, concurrency)

    def _measure_store(
        self, mode: str, store: Store, transfer_config: Mapping[str, object], concurrency: int
    ) -> None:
        """A fresh engine on a store that an earlier one wrote, its files not in memory."""
        with self._engine(f"{mode}-{concurrency}", transfer_config, store) as server:
            store.cool()
            self._measure(server, mode, concurrency, store.tier)

    @contextlib.contextmanager
    def _engine(
        self, name: str, transfer_config: Mapping[str, object] | None, store: Store | None
    ) -> Iterator[Server]:
        """A fresh engine, warmed up with tokens that no session and no other engine has."""
        options = self._options
        self._progress.phase(f"starting vLLM ({name})")
        config = ServerConfig(
            model=self._info.folder,
            kv_cache_gib=_device_gib(options, self._info),
            max_model_len=_model_len(options),
            log_path=self._folder / "logs" / f"{name}.log",
            kv_transfer_config=transfer_config,
            max_num_seqs=_MAX_NUM_SEQS,
            threads=_THREADS,
            port=options.port,
            extra_env={} if store is None else store.env,
        )
        with Server(config) as server:
            self._progress.step()
            self._progress.phase(f"warming up ({name})")
            run_load(server.base_url, self._warm_up(), concurrency=1, max_tokens=options.max_tokens)
            if store is not None:
                self._rest(name, store)
            self._progress.step()
            yield server

    def _warm_up(self) -> list[list[int]]:
        """Prompts that no session and no other engine has."""
        self._num_engines += 1
        seed = _WARM_UP_SEED + self._num_engines
        lengths = [min(length, self._options.prompt_tokens) for length in _WARM_UP_TOKENS]
        return [
            self._prompt(seed * len(lengths) + idx)[:length] for idx, length in enumerate(lengths)
        ]

    def _rest(self, name: str, store: Store) -> None:
        if not store.rest():
            raise ServerError(f"the store does not come to rest: engine={name}")

    def _ask(self, server: Server, phase: str, concurrency: int) -> LoadResult:
        self._progress.phase(phase)
        return run_load(
            server.base_url,
            self._prompts,
            concurrency=concurrency,
            max_tokens=self._options.max_tokens,
            on_answer=self._progress.step,
        )

    def _measure(self, server: Server, mode: str, concurrency: int, tier: str = "") -> None:
        tokens_asked = sum(map(len, self._prompts))
        before, physical_before = _settled_metrics(server), server.read_bytes_physical()
        load = self._ask(server, f"{mode}, concurrency {concurrency}", concurrency)
        physical = server.read_bytes_physical() - physical_before
        after, tokens = _counted(server, before, tokens_asked)
        if not self._reference:
            self._reference = [answer.token_ids for answer in load.answers]
        row = results.make_row(
            mode,
            concurrency,
            load,
            self._reference,
            tokens=tokens,
            tokens_asked=tokens_asked,
            bytes_read=results.bytes_read(before, after),
            bytes_read_physical=physical,
            served=results.tokens_served(before, after, tier) if tier else None,
            missed=results.tokens_missed(before, after),
        )
        self._rows.append(row)

    def _prompt(self, seed: int) -> list[int]:
        return make_prompt(self._encode, self._options.prompt_tokens, seed=seed, bos=self._info.bos)

    def _disk_config(self, root: Path) -> dict[str, object]:
        return kv_transfer_config(
            str(root), self._options.capacity, primary=self._primary, cpu=True
        )

    def _shared_config(self, shared: SharedStore) -> dict[str, object]:
        return kv_transfer_config(
            url=shared.url, primary=self._primary, cpu=True, settings=shared.settings
        )

    @property
    def _primary(self) -> str:
        return f"{_primary_gib(self._options, self._info)}GiB"

    def _configuration(self) -> dict[str, object]:
        kind, device = machine.file_system(self._folder)
        url = self._options.url
        return {
            **({"url": MediumUrl.parse(url).shown} if url else {}),
            "dtype": "float32",
            "output_tokens": self._options.max_tokens,
            "kv_bytes_per_token": self._info.kv_bytes_per_token,
            "threads": _THREADS,
            "cpus": machine.num_cpus(),
            "cpu": machine.cpu_name(),
            "file_system": kind,
            "device": device,
            "capacity": self._options.capacity,
            "device_kv_gib": _device_gib(self._options, self._info),
            "primary_gib": _primary_gib(self._options, self._info),
            **machine.versions(),
        }


def _settled_metrics(server: Server) -> Metrics:
    """Reads the counters once they no longer move: they trail the answers by an engine step."""
    last = server.metrics()
    deadline = time.monotonic() + _COUNTERS_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = server.metrics()
        if results.token_counts(last, now) == TokenCounts() and not results.bytes_read(last, now):
            return now
        last = now
    return last


def _counted(server: Server, before: Metrics, tokens_asked: int) -> tuple[Metrics, TokenCounts]:
    """Reads the counters until they add up, for a few seconds; then as they are."""
    deadline = time.monotonic() + _COUNTERS_TIMEOUT_S
    while True:
        after = _settled_metrics(server)
        tokens = results.token_counts(before, after)
        if tokens.total == tokens_asked or time.monotonic() > deadline:
            return after, tokens


def _get_model(options: DemoOptions) -> machine.ModelInfo:
    if options.model is None:
        return machine.read_model(make_model())
    if options.model == "gemma":
        return machine.read_model(gemma_model())
    return machine.read_model(Path(options.model).resolve())


def _load_tokenizer(folder: Path) -> Callable[[str], list[int]]:
    tokenizers: Any = importlib.import_module("tokenizers")  # comes with vLLM
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"the model directory has no tokenizer.json: model={folder}")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _check_capacity(options: DemoOptions) -> None:
    """Checks what the engine would, once it is started."""
    parent = _parent_folder(options)
    settings = Settings.parse({"path": str(parent), "capacity": options.capacity})
    status = os.statvfs(next(folder for folder in (parent, *parent.parents) if folder.exists()))
    total_bytes = status.f_blocks * status.f_frsize
    if 0 < total_bytes < settings.capacity_bytes + settings.min_free_bytes:
        raise ConfigError(
            f"capacity and min_free together are larger than the file system: path={parent} "
            f"total={format_bytes(total_bytes)} capacity={options.capacity} "
            f"min_free={format_bytes(settings.min_free_bytes)}"
        )


def _check_url(options: DemoOptions) -> None:
    """Asks the other side, so that nothing is started for a wrong address."""
    if options.compare_fs:
        raise ConfigError("vLLM's own file-system tier is compared with drives: give no --url")
    kv_transfer_config(url=options.url, cpu=True)
    check_pool(MediumUrl.parse(options.url))
    with contextlib.closing(open_medium(MediumUrl.parse(options.url), _URL_WITHIN_S)) as medium:
        try:
            medium.check()
        except TierError as error:
            raise ConfigError(f"the storage does not answer: {error}") from error


def _check_fit(options: DemoOptions, info: machine.ModelInfo) -> None:
    """Checks that prompts fit the model and KV caches the memory."""
    if options.prompt_tokens + options.max_tokens > info.max_tokens:
        raise ConfigError(
            f"prompt and output are longer than the model takes: max_tokens={info.max_tokens} "
            f"prompt_tokens={options.prompt_tokens} output_tokens={options.max_tokens}"
        )
    needed_gib = _device_gib(options, info) + _primary_gib(options, info)
    available = machine.memory_available()
    if needed_gib * _GIB > available:
        raise ConfigError(
            "the KV cache of the sessions does not fit the memory; ask for fewer sessions or "
            f"tokens: needed={needed_gib}GiB available={available / _GIB:.1f}GiB"
        )


def _device_gib(options: DemoOptions, info: machine.ModelInfo) -> int:
    """KV space that holds all sessions and the warm-up at once, so that device hits are whole."""
    tokens = (options.sessions + 2) * (options.prompt_tokens + options.max_tokens + 256)
    needed = max(tokens, _model_len(options)) * info.kv_bytes_per_token
    return max(1, math.ceil(1.1 * needed / _GIB))


def _primary_gib(options: DemoOptions, info: machine.ModelInfo) -> int:
    """Host pool for twice the sessions in flight: staging, not a tier that serves."""
    tokens = 2 * max(options.concurrencies) * (options.prompt_tokens + options.max_tokens)
    return max(1, math.ceil(tokens * info.kv_bytes_per_token / _GIB))


def _model_len(options: DemoOptions) -> int:
    return max(_MIN_MODEL_LEN, options.prompt_tokens + options.max_tokens)


def _count_steps(options: DemoOptions) -> int:
    num_stores = 2 if options.compare_fs else 1
    num_modes = num_stores + 2
    num_engines = num_stores * (1 + len(options.concurrencies)) + 1
    num_requests = options.sessions * (num_stores + num_modes * len(options.concurrencies))
    return 1 + 2 * num_engines + num_requests


@contextlib.contextmanager
def _working_folder(options: DemoOptions) -> Iterator[Path]:
    """A new folder, removed at the end; of a run whose engine failed the logs stay."""
    parent = _parent_folder(options)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
    kept = set()
    try:
        try:
            yield folder
        except ServerError:
            kept = {"logs"}
            raise
        finally:
            if not options.keep:
                for child in folder.iterdir():
                    if child.name not in kept:
                        shutil.rmtree(child, ignore_errors=True)
                with contextlib.suppress(OSError):  # the logs are in it
                    folder.rmdir()
    except KeyboardInterrupt:
        left = "what there was is in" if folder.exists() else "nothing is left of"
        raise KeyboardInterrupt(f"; {left} {folder}") from None


def _parent_folder(options: DemoOptions) -> Path:
    return Path(options.path or Path.home() / ".cache" / "stepwell").resolve()
