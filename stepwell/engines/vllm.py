"""vLLM's seam: a connector that says who the engine is, and the tier below its host memory.

vLLM moves KV between the device and its primary (host memory); `StepwellTier` moves it between
the primary and Stepwell's store. `stepwell vllm-args` prints the configuration.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, ParamSpec, TypeVar

import stepwell
from stepwell.core.identity import Identity
from stepwell.core.keys import Root, make_key
from stepwell.core.leases import Lease
from stepwell.core.types import Chunk, Direction, JobResult, Lookup, Outcome, Reason
from stepwell.engines import vllm_contract
from stepwell.engines.vllm_identity import describe_engine, with_hash
from stepwell.errors import ConfigError, StepwellError
from stepwell.metrics import DEFINITIONS
from stepwell.settings import Settings
from stepwell.store import Store

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingMetricMetadata,
        OffloadKey,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
except ImportError as error:
    package = vllm_contract.installed_package()
    version = vllm_contract.version_of(package) if package else "none"
    raise ConfigError(
        f"this vLLM has no tiered offloading that Stepwell can plug into ({error}); take Stepwell "
        f"out of --kv-transfer-config, or use vLLM 0.32 or newer: vllm={version}"
    ) from error

__all__ = ["StepwellConnector", "StepwellTier"]

logger = logging.getLogger("vllm.stepwell")  # so that vLLM's handlers print it

TIER_TYPE = "StepwellTier"

# A lease outlives any request's use of its chunks by far and is given back at the request's end.
_LEASE_S = 120.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Engine:
    vllm_config: Any
    kv_cache_config: Any


_engine: contextvars.ContextVar[_Engine | None] = contextvars.ContextVar("engine", default=None)


class StepwellConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which also tells `StepwellTier` what it needs to know.

    vLLM hands a tier a summary of its configuration that leaves out what KV depends on (rope
    overrides, weights' revision, quantization, hash function, ...). The connector is given the
    whole of it.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer_config = vllm_config.kv_transfer_config
        with _reported():
            _check(transfer_config.kv_connector_extra_config)
        token = _engine.set(_Engine(vllm_config, kv_cache_config))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _engine.reset(token)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """As vLLM's; checks the settings on the way, since this is asked before weights load."""
        with _reported():
            _check(vllm_config.kv_transfer_config.kv_connector_extra_config)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Log a configuration error as one line; vLLM's own report of it is a page long."""
    try:
        yield
    except ConfigError as error:
        logger.error("Stepwell: %s", error)
        raise


def _check(extra_config: dict[str, Any]) -> None:
    """Check the settings of every Stepwell tier and that this vLLM fits.

    With ``"if_incompatible": "start_without"`` a vLLM that does not fit loses its Stepwell tiers.

    Raises:
        ConfigError: a setting is wrong, or vLLM does not fit.
    """
    tiers = [t for t in extra_config.get("secondary_tiers", ()) if t.get("type") == TIER_TYPE]
    settings = [Settings.parse(_own_settings(tier)) for tier in tiers]
    package = vllm_contract.installed_package()
    cpu = extra_config.get("spec_name") == "StepwellCpuTieringSpec"
    differences = vllm_contract.probe(package, cpu=cpu) if package else []
    if not tiers or not differences:
        return
    words = "; ".join(str(difference) for difference in differences)
    version = vllm_contract.version_of(package) if package else "none"
    fits = f"vllm={version} stepwell={stepwell.__version__}"
    if any(s.if_incompatible != "start_without" for s in settings):
        raise ConfigError(
            f'this vLLM is not what Stepwell was written for ({words}); "if_incompatible": '
            f'"start_without" would start the engine without Stepwell: {fits}'
        )
    logger.error(
        "Stepwell: starting WITHOUT Stepwell, as if_incompatible says: %s: %s", words, fits
    )
    extra_config["secondary_tiers"] = [t for t in extra_config["secondary_tiers"] if t not in tiers]


def _own_settings(tier_config: Mapping[str, Any]) -> dict[str, Any]:
    # What vLLM itself reads from a tier's configuration is not for us.
    theirs = ("type", "module_path", "backpressure")
    return {name: value for name, value in tier_config.items() if name not in theirs}


@dataclass(slots=True)
class _RequestState:
    """What one request asked for: each key's latest answer, and the lease on what it wrote."""

    asked: dict[bytes, tuple[Lookup, Reason]] = field(default_factory=dict)
    stored: list[bytes] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _JobInfo:
    job_id: int
    keys: list[OffloadKey]
    req_id: str


def _guarded(where: str, otherwise: T) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Answer ``otherwise`` instead of raising into an engine step, and count that."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(*args, **kwargs)
            except Exception:  # counted as internal_errors
                tier = args[0]
                if isinstance(tier, StepwellTier):
                    tier.on_internal_error(where)
                return otherwise

        return guarded

    return decorate


class StepwellTier(SecondaryTierManager):
    """A secondary tier of vLLM that keeps chunks in a `stepwell.store.Store`.

    Threading: vLLM calls from its scheduler thread; no call but `drain_jobs` and `shutdown`
        waits for I/O, hashes a payload or touches a directory.
    Ownership: vLLM pins the rows of a job until `get_finished_jobs` reports it.
    Errors: ConfigError from the constructor; afterwards nothing is raised, a failure is a miss.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: from vLLM.
        settings: `stepwell.settings.Settings` as texts.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        self._row_bytes = self.block_size_bytes
        with _reported():
            self._settings = Settings.parse(settings)
            self._engine_identity = self._describe(offloading_spec)
            self._store = Store.open(self._settings)
        # Last, since vLLM cannot give its memory back while a view of it is left.
        self._rows = primary_kv_view.cast("B")
        self._root: Root | None = None
        self._requests: dict[str, _RequestState] = {}
        self._jobs: dict[int, _JobInfo] = {}
        self._ready: list[VllmJobResult] = []
        self._told: dict[tuple[str, tuple[str, ...]], int] = {}
        logger.info(
            "Stepwell %s: path=%s chunk_bytes=%d",
            stepwell.__version__,
            self._settings.path,
            self._row_bytes,
        )

    @property
    def store(self) -> Store:
        """The store below this tier."""
        return self._store

    # Lookups.

    @_guarded("on_new_request", RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Open the request's books."""
        if self._root is None:
            # vLLM sets its hash function up after it has built its tiers.
            whole = with_hash(self._engine_identity, kv_cache_utils.NONE_HASH)
            self._root = self._store.use_root(whole)
        self._requests[req_context.req_id] = _RequestState()
        return RequestOffloadingContext()

    @_guarded("lookup", LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        """HIT or MISS, at once. A chunk whose read failed for this request stays a MISS."""
        state = self._requests.get(req_context.req_id)
        if state is None or self._root is None:
            return LookupResult.MISS
        before = state.asked.get(key)
        if before is not None and before[0] is Lookup.MISS and before[1] is not Reason.ABSENT:
            return LookupResult.MISS
        # PENDING is no hit: while a chunk is being written, the primary has it.
        hit = self._store.lookup([make_key(self._root, key)])[0] is Lookup.HIT
        state.asked[key] = (Lookup.HIT, Reason.NONE) if hit else (Lookup.MISS, Reason.ABSENT)
        return LookupResult.HIT if hit else LookupResult.MISS

    @_guarded("on_request_finished", None)
    def on_request_finished(self, req_context: Any) -> None:
        """Count what was asked, make the request's chunks recent, give its leases back."""
        state = self._requests.pop(req_context.req_id, None)
        if state is None:
            return
        for answer, reason in state.asked.values():
            self._store.context.metrics.add("lookups", (answer.value, reason))
        for lease in state.leases:
            lease.release()
        hits = [key for key, (answer, _) in state.asked.items() if answer is Lookup.HIT]
        used = dict.fromkeys([*hits, *state.stored])
        if used and self._root is not None:
            prefix = sorted(used, key=lambda key: req_context.get_offload_key_position(key) or 0)
            self._store.touch([make_key(self._root, key) for key in prefix])

    # Jobs.

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks into rows of the primary."""
        self._submit(job_metadata, Direction.READ)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write rows of the primary."""
        self._submit(job_metadata, Direction.WRITE)

    @_guarded("get_finished_jobs", [])
    def get_finished_jobs(self) -> list[VllmJobResult]:
        """The loads and stores that ended since the last call."""
        ready, self._ready = self._ready, []
        for result in self._store.poll():
            self._collect(result, ready)
        return ready

    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping so that ended jobs are collected."""
        return bool(self._jobs or self._ready)

    def drain_jobs(self) -> None:
        """Block until no job touches the primary; their results wait for `get_finished_jobs`."""
        while self._jobs:
            for result in self._store.drain(10.0):
                self._collect(result, self._ready)
            if self._jobs:
                logger.warning("Stepwell: still waiting for I/O: jobs=%d", len(self._jobs))

    def shutdown(self) -> None:
        """Stop the store's threads and let go of the primary's memory."""
        self._store.close()
        self._store.poll()
        self._jobs.clear()
        self._rows.release()

    # Numbers.

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The counters of `stepwell.metrics`, as ``vllm:stepwell_<name>`` on vLLM's /metrics."""
        definitions: dict[str, OffloadingMetricMetadata] = {
            f"vllm:stepwell_{d.name}": OffloadingCounterMetadata(d.documentation, d.labels)
            for d in DEFINITIONS
        }
        definitions["vllm:stepwell_used_bytes"] = OffloadingGaugeMetadata(
            "Bytes that a tier takes.", ("tier",)
        )
        return definitions

    @_guarded("get_stats", None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        now = self._store.context.metrics.snapshot()
        if now == self._told:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), value in now.items():
            added = value - self._told.get((name, labels), 0)
            if added:
                stats.increase_counter(f"vllm:stepwell_{name}", added, labels)
        for tier in self._store.tiers:
            used_bytes = getattr(tier, "used_bytes", None)
            if used_bytes is not None:
                stats.set_gauge("vllm:stepwell_used_bytes", used_bytes, (tier.name,))
        self._told = now
        return stats

    def on_internal_error(self, where: str) -> None:
        """Count and log an exception that was kept from the engine."""
        self._store.context.metrics.add("internal_errors", (where,))
        logger.exception("Stepwell: an internal error became a miss: where=%s", where)

    # Within.

    def _describe(self, offloading_spec: Any) -> Identity:
        engine = _engine.get()
        if engine is None:
            raise ConfigError(
                f"{TIER_TYPE} needs Stepwell's connector, which knows the engine's whole "
                f'configuration: write "kv_connector": "StepwellConnector", '
                f'"kv_connector_module_path": "{__name__}", or let "stepwell vllm-args" print it: '
                f"kv_connector=OffloadingConnector"
            )
        return describe_engine(
            engine.vllm_config,
            engine.kv_cache_config,
            offloading_spec.config,
            weights_id=self._settings.weights_id,
            chunk_bytes=self._row_bytes,
        )

    def _submit(self, job: TransferJob, direction: Direction) -> None:
        # Whatever happens, vLLM hears of the job again, or its rows stay pinned for ever.
        try:
            self._begin(job, direction)
        except StepwellError:
            self._ready.append(VllmJobResult(job.job_id, success=False))
        except Exception:  # counted as internal_errors
            self.on_internal_error(f"submit_{direction}")
            self._ready.append(VllmJobResult(job.job_id, success=False))

    def _begin(self, job: TransferJob, direction: Direction) -> None:
        state = self._requests.get(job.req_context.req_id) or _RequestState()
        root = self._root
        if root is None:
            raise StepwellError("no request was announced")
        keys = list(job.keys)
        full_keys = [make_key(root, key) for key in keys]
        position = job.req_context.get_offload_key_position
        chunks = [
            Chunk(full_key, self._row(int(row)), position(key) or 0)
            for key, full_key, row in zip(keys, full_keys, job.chunk_ids, strict=True)
        ]
        # Neither what is about to be read nor the beginning of a prefix whose end is still
        # being written may be evicted meanwhile.
        state.leases.append(self._store.acquire(full_keys, _LEASE_S))
        if direction is Direction.READ:
            store_job_id = self._store.read(chunks, self._settings.read_deadline_s)
        else:
            state.stored += keys
            store_job_id = self._store.write(chunks, self._settings.write_deadline_s)
        self._jobs[store_job_id] = _JobInfo(job.job_id, keys, job.req_context.req_id)

    def _row(self, row_idx: int) -> memoryview:
        begin = row_idx * self._row_bytes
        return self._rows[begin : begin + self._row_bytes]

    def _collect(self, result: JobResult, ready: list[VllmJobResult]) -> None:
        info = self._jobs.pop(result.job_id, None)
        if info is None:
            return  # a touch
        done = [
            key for key, r in zip(info.keys, result.results, strict=True)
            if r.outcome is Outcome.DONE
        ]  # fmt: skip
        if result.direction is Direction.READ:
            self._remember_failures(info, result)
        ready.append(
            VllmJobResult(
                info.job_id,
                success=result.done,
                successful_keys=done if done and not result.done else None,
                transfer_time=result.elapsed_s,
                transfer_bytes=result.moved_bytes,
            )
        )

    def _remember_failures(self, info: _JobInfo, result: JobResult) -> None:
        """Keep vLLM from asking for the same chunk, and getting the same failure, for ever."""
        state = self._requests.get(info.req_id)
        if state is None:
            return
        for key, chunk_result in zip(info.keys, result.results, strict=True):
            if chunk_result.outcome is not Outcome.DONE:
                # ABSENT here means that the chunk left between lookup and read.
                reason = chunk_result.reason
                state.asked[key] = (
                    Lookup.MISS,
                    Reason.VANISHED if reason is Reason.ABSENT else reason,
                )
