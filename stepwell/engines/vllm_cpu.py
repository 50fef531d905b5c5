"""vLLM's own offloading on its CPU backend: the device copy becomes a memory copy.

vLLM refuses to offload on the CPU platform, because its worker copies with CUDA. Everything else
of its tiering runs there; this module replaces that one worker, so that the whole path to
Stepwell runs, and is tested, without a GPU.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from stepwell.engines.vllm_check import reported
from stepwell.errors import ConfigError
from stepwell.settings import format_bytes

__all__ = ["MemoryCopyWorker", "StepwellCpuTieringSpec"]


class MemoryCopyWorker(OffloadingWorker):
    """Copies blocks between the device's KV cache and the rows of the primary.

    Threading: one thread of its own copies, in the order of submission; the caller never waits
        except in `wait`.
    Ownership: vLLM keeps a job's blocks and rows in place until `get_finished` reports it.

    Args:
        kv_caches: the device's tensors, and which of them each KV group uses.
        blocks_per_chunk: device blocks in one row of the primary.
        region: the primary's memory; closed with the worker.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._device = [
            tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes)
            for tensor in kv_caches.tensors
        ]
        self._page_bytes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._host = [
            region.create_next_worker_view(page_bytes * blocks_per_chunk)
            for page_bytes in self._page_bytes
        ]
        self._tensor_idxs = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stepwell-copy")
        self._lock = threading.Lock()
        self._running: dict[int, Future[None]] = {}
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin to copy device blocks to rows of the primary."""
        return self._submit(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Begin to copy rows of the primary to device blocks."""
        return self._submit(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended."""
        with self._lock:
            running = [self._running[job_id] for job_id in job_ids if job_id in self._running]
        futures.wait(running)

    def shutdown(self) -> None:
        """End the running copies and give the memory back."""
        self._thread.shutdown(wait=True)
        self._device.clear()
        self._host.clear()
        if self._region is not None:
            if not os.path.exists(self._region.mmap_path):
                # Our spec took the name away; without this vLLM logs a traceback about it.
                self._region._creator = False
            self._region.cleanup()
            self._region = None

    def _submit(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, to_host: bool
    ) -> bool:
        with self._lock:
            self._running[job_id] = self._thread.submit(self._run, job_id, device, host, to_host)
        return True

    def _run(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, to_host: bool
    ) -> None:
        began_s = time.monotonic()
        moved_bytes: int | None = None
        try:
            moved_bytes = self._copy(device, host, to_host)
        finally:
            # vLLM ends with an assertion on a failed copy; without a result it would wait.
            with self._lock:
                self._running.pop(job_id, None)
                self._finished.append(
                    TransferResult(
                        job_id, moved_bytes is not None, moved_bytes, time.monotonic() - began_s
                    )
                )

    def _copy(self, device: GPULoadStoreSpec, host: LoadStoreSpec, to_host: bool) -> int:
        moved_bytes = 0
        for group_idx, block_id, row, offset in self._pairs(device, host):
            for tensor_idx in self._tensor_idxs[group_idx]:
                page_bytes = self._page_bytes[tensor_idx]
                block = self._device[tensor_idx][block_id]
                begin = offset * page_bytes
                cell = self._host[tensor_idx][row, begin : begin + page_bytes]
                if to_host:
                    cell.copy_(block)
                else:
                    block.copy_(cell)
                moved_bytes += page_bytes
        return moved_bytes

    def _pairs(
        self, device: GPULoadStoreSpec, host: LoadStoreSpec
    ) -> Iterator[tuple[int, int, int, int]]:
        """(group, device block, row of the primary, block within the row), as vLLM pairs them."""
        rows = iter(host.block_ids.tolist())
        blocks = iter(device.block_ids.tolist())
        per_chunk = self._blocks_per_chunk
        for group_idx, num_blocks in enumerate(device.group_sizes):
            first = device.block_indices[group_idx]
            row = -1
            for idx in range(first, first + num_blocks):
                if idx == first or idx % per_chunk == 0:
                    row = next(rows)
                yield group_idx, next(blocks), row, idx % per_chunk


class StepwellCpuTieringSpec(TieringOffloadingSpec):
    """vLLM's TieringOffloadingSpec with `MemoryCopyWorker` in place of the CUDA one."""

    _worker: OffloadingWorker | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.num_chunks < 1:
            with reported():
                raise ConfigError(
                    "the primary is smaller than one chunk: "
                    f"primary={format_bytes(int(self.extra_config['cpu_bytes_to_use']))} "
                    f"chunk={format_bytes(self.kv_bytes_per_chunk)}"
                )

    def get_manager(self) -> OffloadingManager:
        """vLLM's manager; takes the primary's file name away once everybody has mapped it."""
        manager = super().get_manager()
        # The workers map the file before the scheduler does. Without its name the kernel frees
        # the memory with the last process, however that ends; vLLM 0.32 leaves the file in
        # /dev/shm when a server is stopped.
        if self._scheduler_mmap is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._scheduler_mmap.mmap_path)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this process."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemoryCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
