"""The connector that says who the engine is, and the tier below vLLM's host memory.

vLLM moves KV between the device and its primary (host memory); `StepwellTier` moves it between
the primary and Stepwell's store.
"""

import contextvars
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, TypeVar

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
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import stepwell
from stepwell.core.identity import Identity
from stepwell.core.keys import Root, make_key
from stepwell.core.types import Chunk, Direction, JobResult, Lookup, Outcome, Reason
from stepwell.engines.books import RequestBooks
from stepwell.engines.prefill import StepTimer
from stepwell.engines.vllm_args import MODULE
from stepwell.engines.vllm_check import TIER_TYPE, check, logger, reported
from stepwell.engines.vllm_identity import describe_engine, with_hash
from stepwell.errors import ConfigError, StepwellError
from stepwell.metrics import DEFINITIONS, GAUGES
from stepwell.settings import Settings, format_bytes
from stepwell.store import Store
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["StepwellConnector", "StepwellTier"]

# Given back at the request's end; a request that runs longer loses the protection, nothing else.
_LEASE_S = 600.0

_Books = RequestBooks[OffloadKey]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Engine:
    """What a connector tells the tiers that vLLM builds for it, and the tiers themselves."""

    vllm_config: Any
    kv_cache_config: Any
    timer: StepTimer
    tiers: "list[StepwellTier]"


_engine: contextvars.ContextVar[_Engine | None] = contextvars.ContextVar("engine", default=None)


class StepwellConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which also tells `StepwellTier` what it needs to know.

    vLLM hands a tier a summary of its configuration that leaves out what KV depends on (rope
    overrides, weights' revision, quantization, hash function, ...). The connector is given the
    whole of it.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer_config = vllm_config.kv_transfer_config
        with reported():
            check(transfer_config.kv_connector_extra_config)
        # vLLM's executor in the scheduler's own process reports nothing for a step without tokens.
        backend = getattr(vllm_config.parallel_config, "distributed_executor_backend", None)
        self._timer = StepTimer(empty_steps_have_outputs=backend != "uni")
        self._tiers: list[StepwellTier] = []
        engine = _Engine(vllm_config, kv_cache_config, self._timer, self._tiers)
        token = _engine.set(engine)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _engine.reset(token)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's; a request that waits for a drive that does not answer is computed instead.

        Its rows of the primary stay where they are until the drive lets go of them.
        """
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if found[0] is None and any(tier.gives_up(request.request_id) for tier in self._tiers):
            return 0, False
        return found

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's; the step is timed, to know how fast the engine computes."""
        if self._tiers:
            counts: dict[str, int] = scheduler_output.num_scheduled_tokens
            # One token is a decode, and so are drafts; what is more belongs to a prompt.
            drafts: dict[str, Any] = getattr(scheduler_output, "scheduled_spec_decode_tokens", {})
            prompt_tokens = sum(
                count for req_id, count in counts.items() if count > 1 and req_id not in drafts
            )
            now_s = time.monotonic()
            self._timer.on_scheduled(prompt_tokens, sum(counts.values()), now_s)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM's; the step's outputs are there."""
        self._timer.on_outputs(time.monotonic())
        super().update_connector_output(connector_output)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """As vLLM's; checks the settings on the way, since this is asked before weights load."""
        with reported():
            check(vllm_config.kv_transfer_config.kv_connector_extra_config)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout


@dataclass(frozen=True, slots=True)
class _JobInfo:
    job_id: int
    keys: list[OffloadKey]
    request: _Books
    is_load: bool
    late: bool  # it came when its request had ended


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
        self._row_bytes = self.block_size_bytes
        per_chunk = offloading_spec.blocks_per_chunk
        self._chunk_tokens = [
            group.tokens_per_block * per_chunk for group in offloading_spec.config.groups
        ]
        with reported():
            self._settings = Settings.parse(settings)
            self.locality = Locality.REMOTE if self._settings.url else Locality.LOCAL
            if self._settings.url:
                # What vLLM has for a remote store, and for several tiers where one is of no name.
                self.cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED
            engine = self._engine()
            self._engine_identity = self._describe(engine, offloading_spec)
            self._store = Store.open(self._settings)
        # Last, since vLLM cannot give its memory back while a view of it is left.
        self._rows = primary_kv_view.cast("B")
        self._root: Root | None = None
        self._requests: dict[str, _Books] = {}
        self._jobs: dict[int, _JobInfo] = {}
        self._ready: list[VllmJobResult] = []
        self._told: dict[tuple[str, tuple[str, ...]], int] = {}
        self._told_gauges: dict[tuple[str, str], float] = {}
        self._timer = engine.timer
        engine.tiers.append(self)
        logger.info(
            "Stepwell %s: path=%s url=%s chunks=%d used=%s capacity=%s chunk=%s",
            stepwell.__version__,
            ",".join(map(str, self._settings.paths)),
            MediumUrl.parse(self._settings.url).shown if self._settings.url else "",
            self._store.num_chunks,
            format_bytes(sum(self._store.used_bytes.values())),
            format_bytes(self._settings.capacity_bytes),
            format_bytes(self._row_bytes),
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
        # vLLM fills the positions in later, and goes on doing so.
        self._requests[req_context.req_id] = _Books(positions=req_context._offload_key_positions)
        return RequestOffloadingContext()

    @_guarded("lookup", LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        """HIT or MISS at once, or RETRY while a shared tier finds out, and not for long.

        A chunk whose read failed for this request stays a MISS.
        """
        state = self._requests.get(req_context.req_id)
        if state is None or self._root is None:
            return LookupResult.MISS
        if state.group is None:
            state.group = get_offload_group_idx(key)
        if not state.may_ask(key):
            return LookupResult.MISS
        # PENDING is no hit: while a chunk is being written, the primary has it.
        full_key = make_key(self._root, key)
        answer = self._store.lookup([full_key])[0]
        if answer is Lookup.UNKNOWN:
            return self._not_known(state, key)
        if answer is not Lookup.HIT:
            state.miss(key, self._store.why_missed(full_key))
            return LookupResult.MISS
        worth = self._worth(state, key, req_context)
        if worth is None:
            return self._not_known(state, key)
        if not worth:
            state.miss(key, Reason.NOT_WORTH)
            return LookupResult.MISS
        state.hit(key)
        return LookupResult.HIT

    def _not_known(self, state: _Books, key: OffloadKey) -> LookupResult:
        """What to say while a tier is finding out."""
        answer = state.unknown(key, time.monotonic(), self._settings.slow_after_s)
        return {
            Lookup.HIT: LookupResult.HIT,
            Lookup.UNKNOWN: LookupResult.RETRY,
        }.get(answer, LookupResult.MISS)

    def _worth(self, state: _Books, key: OffloadKey, req_context: Any) -> bool | None:
        """Whether reading a chunk that is there ends sooner than computing it; None: not known yet.

        Decided once a request, with the first chunk that is a hit: for the prefix that begins
        with it, of its KV group. What vLLM asks of other groups follows from that.
        """
        positions: dict[OffloadKey, int] = req_context._offload_key_positions
        begin = positions.get(key)
        if begin is None or self._root is None:
            return True
        if state.worth_tokens is None:
            prefix = sorted(
                (end, other)
                for other, end in positions.items()
                if end >= begin and get_offload_group_idx(other) == state.group
            )
            always = self._settings.read_when == "always"
            patient = state.may_wait(time.monotonic(), self._settings.slow_after_s)
            ahead = self._store.look_ahead(
                [make_key(self._root, other) for _, other in prefix],
                chunk_bytes=self._row_bytes * len(self._chunk_tokens),
                chunk_tokens=self._chunk_tokens[state.group or 0],
                prefill_tokens_per_s=None if always else self._timer.rate.tokens_per_s,
                floor_tokens=self._settings.min_read_tokens,
                until_known=patient,
            )
            if ahead.unknown and patient:
                return None
            # Everything that is there, if it is all worth it: more may turn up.
            whole = ahead.num_worth >= ahead.num_hits
            end = prefix[ahead.num_worth - 1][0] if ahead.num_worth else 0
            state.worth_tokens = math.inf if whole else end
        return get_offload_group_idx(key) != state.group or begin <= state.worth_tokens

    @_guarded("on_request_finished", None)
    def on_request_finished(self, req_context: Any) -> None:
        """Count what was asked, make the request's chunks recent, give its leases back."""
        state = self._requests.pop(req_context.req_id, None)
        if state is None or self._root is None:
            return
        positions: dict[OffloadKey, int] = req_context._offload_key_positions
        # Each token is counted once, by the group that decides how much is reused.
        chunk_tokens = self._chunk_tokens[state.group or 0]
        tokens = {
            key: chunk_tokens for key in positions if get_offload_group_idx(key) == state.group
        }
        state.count(self._store.context.metrics, tokens)
        state.give_back_leases()
        # All of the prompt, not only what we were asked for: what the device or the primary
        # had is in use as well, and its beginning must not leave before its end.
        if positions:
            prefix = sorted(positions, key=positions.__getitem__)
            self._store.touch([make_key(self._root, key) for key in prefix])

    @_guarded("gives_up", False)
    def gives_up(self, req_id: str) -> bool:
        """Whether a request should not wait any longer for what is being read.

        For itself or for another one with the same beginning, whose rows it waits for.
        """
        overdue = self._store.overdue()
        state = self._requests.get(req_id)
        if not overdue or state is None:
            return False
        late = [self._jobs[job_id] for job_id in overdue if job_id in self._jobs]
        late = [job for job in late if job.is_load]
        for job in late:
            if job.request is state:  # whoever asked for it has missed it
                for key in job.keys:
                    state.miss(key, Reason.DEADLINE)
        return any(key in state.positions for job in late for key in job.keys)

    # Jobs.

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks into rows of the primary."""
        self._submit(job_metadata, Direction.READ)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write rows of the primary."""
        self._submit(job_metadata, Direction.WRITE)

    def get_finished_jobs(self) -> list[VllmJobResult]:
        """The loads and stores that ended since the last call."""
        self._collect(self._poll())
        ready, self._ready = self._ready, []
        return ready

    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping so that ended jobs are collected."""
        return bool(self._jobs or self._ready)

    def drain_jobs(self) -> None:
        """Block until no job touches the primary; their results wait for `get_finished_jobs`."""
        while self._jobs:
            self._collect(self._drain())
            if self._jobs and self._store.unfinished:
                logger.warning("Stepwell: still waiting for I/O: jobs=%d", len(self._jobs))
            elif self._jobs:
                # Nothing runs any more, so nobody will report these; the engine must not wait.
                self._ready += [VllmJobResult(i.job_id, success=False) for i in self._jobs.values()]
                self._jobs.clear()

    @_guarded("poll", list[JobResult]())
    def _poll(self) -> list[JobResult]:
        return self._store.poll()

    @_guarded("drain", list[JobResult]())
    def _drain(self) -> list[JobResult]:
        return self._store.drain(10.0)

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
        definitions |= {
            f"vllm:stepwell_{d.name}": OffloadingGaugeMetadata(d.documentation, d.labels)
            for d in GAUGES
        }
        return definitions

    @_guarded("get_stats", None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        now = self._store.context.metrics.snapshot()
        gauges = self._store.gauges()
        if now == self._told and gauges == self._told_gauges:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), value in now.items():
            added = value - self._told.get((name, labels), 0)
            if added:
                stats.increase_counter(f"vllm:stepwell_{name}", added, labels)
        for (name, tier_name), gauge in gauges.items():
            stats.set_gauge(f"vllm:stepwell_{name}", gauge, (tier_name,))
        self._told, self._told_gauges = now, gauges
        return stats

    def on_internal_error(self, where: str) -> None:
        """Count and log an exception that was kept from the engine."""
        self._store.context.metrics.add("internal_errors", (where,))
        logger.exception("Stepwell: an internal error became a miss: where=%s", where)

    # Within.

    @staticmethod
    def _engine() -> _Engine:
        engine = _engine.get()
        if engine is None:
            raise ConfigError(
                f"{TIER_TYPE} needs Stepwell's connector, which knows the engine's whole "
                f'configuration: write "kv_connector": "StepwellConnector", '
                f'"kv_connector_module_path": "{MODULE}", or let "stepwell vllm-args" print it: '
                f"kv_connector=OffloadingConnector"
            )
        return engine

    def _describe(self, engine: _Engine, offloading_spec: Any) -> Identity:
        return describe_engine(
            engine.vllm_config,
            engine.kv_cache_config,
            offloading_spec.config,
            weights_id=self._settings.weights_id,
            chunk_bytes=self._row_bytes,
        )

    def _submit(self, job: TransferJob, direction: Direction) -> None:
        # Whatever happens, vLLM hears of the job again, or its rows stay pinned for ever; and a
        # chunk that could not be read is not offered again, or the request circles for ever.
        state = self._requests.get(job.req_context.req_id) or _Books()
        try:
            store_job_id, keys = self._begin(job, direction, state)
        except Exception:  # counted as internal_errors
            self.on_internal_error(f"submit_{direction}")
            if direction is Direction.READ:
                for key in job.keys:
                    state.miss(key, Reason.INTERNAL)
            self._ready.append(VllmJobResult(job.job_id, success=False))
        else:
            self._jobs[store_job_id] = _JobInfo(
                job.job_id,
                keys,
                state,
                is_load=direction is Direction.READ,
                late=job.req_context.req_id not in self._requests,
            )

    def _begin(
        self, job: TransferJob, direction: Direction, state: _Books
    ) -> tuple[int, list[OffloadKey]]:
        """Returns the store's number of the job, and its keys in the order of its results."""
        if self._root is None:
            raise StepwellError("no request was announced")
        position = job.req_context.get_offload_key_position
        # vLLM hands over sets. In the order of the prefix its chunks become neighbours, drives
        # take turns over it, and what is refused is its end.
        parts = sorted(
            (position(key) or 0, key, int(row))
            for key, row in zip(job.keys, job.chunk_ids, strict=True)
        )
        order = [key for _, key, _ in parts]
        keys = [make_key(self._root, key) for key in order]
        chunks = [
            Chunk(full_key, self._row(row), end_token)
            for full_key, (end_token, _, row) in zip(keys, parts, strict=True)
        ]
        # Neither what is about to be read nor the beginning of a prefix whose end is still
        # being written may be evicted meanwhile.
        state.leases.append(self._store.acquire(keys, _LEASE_S))
        if direction is Direction.READ:
            return self._store.read(chunks, self._settings.read_deadline_s), order
        return self._store.write(chunks, self._settings.write_deadline_s), order

    def _row(self, row_idx: int) -> memoryview:
        begin = row_idx * self._row_bytes
        return self._rows[begin : begin + self._row_bytes]

    def _collect(self, results: list[JobResult]) -> None:
        for result in results:
            info = self._jobs.pop(result.job_id, None)
            if info is None:
                continue  # a touch
            done = [
                key
                for key, r in zip(info.keys, result.results, strict=True)
                if r.outcome is Outcome.DONE
            ]
            if result.direction is Direction.READ:
                self._note_read(info, result)
            if info.late:
                info.request.give_back_leases()
            self._ready.append(
                VllmJobResult(
                    info.job_id,
                    success=result.done,
                    successful_keys=done if done and not result.done else None,
                    transfer_time=result.elapsed_s,
                    transfer_bytes=result.moved_bytes,
                )
            )

    def _note_read(self, info: _JobInfo, result: JobResult) -> None:
        state = info.request
        for key, chunk_result, tier in zip(info.keys, result.results, result.tiers, strict=True):
            if chunk_result.outcome is Outcome.DONE:
                state.serve(key, tier)
            else:
                # ABSENT here means that the chunk left between lookup and read.
                absent = chunk_result.reason is Reason.ABSENT
                state.miss(key, Reason.VANISHED if absent else chunk_result.reason)
