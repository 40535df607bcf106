"""What vLLM loads: `"kv_connector": "StemcacheConnector", "kv_connector_module_path": "adapters.vllm.connector"`.

vLLM makes one for its scheduler and one for each worker. Loads are asynchronous only: vLLM's newer model runner
gives wrong tokens after a synchronous one that failed (vllm#49250).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from adapters.vllm.identity import check_config, fingerprint, weights_identity
from adapters.vllm.layout import read_layout
from adapters.vllm.metadata import StepOrders, StepReports
from adapters.vllm.page_copies import PageCopies
from adapters.vllm.saving import BoundaryState
from adapters.vllm.scheduler_side import Scheduled, SchedulerSide
from adapters.vllm.settings import Settings
from adapters.vllm.tier_clients import make_index, make_store
from adapters.vllm.worker_side import WorkerSide

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Orders(KVConnectorMetadata):
    step: StepOrders


@dataclass
class Reports(KVConnectorWorkerMetadata):
    step: StepReports

    def aggregate(self, other: Reports) -> Reports:
        return Reports(self.step.merge(other.step))


class StemcacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises ValueError at the start, naming the option, for what it cannot serve."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_config(vllm_config)
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        self._layout = read_layout(kv_cache_config, lambda spec: get_kv_cache_spec_kind(spec).value, iter_layer_specs)
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduler = self._make_scheduler() if role is KVConnectorRole.SCHEDULER else None
        self._worker: WorkerSide | None = None
        self._bad_blocks: set[int] = set()

    def _make_scheduler(self) -> SchedulerSide:
        config, transfer = self._vllm_config, self._kv_transfer_config
        load_format = str(config.load_config.load_format)
        weights = weights_identity(config.model_config, load_format, self._settings.model_digest)
        platform = (vllm_version, torch.__version__, current_platform.device_type, current_platform.get_device_name())
        name = config.model_config.served_model_name
        identity = fingerprint(config, self._layout, get_none_hash_seed(), weights, platform)
        index = make_index(
            self._settings,
            self._layout,
            self._num_ranks,
            engine=f"vllm {vllm_version}",
            fingerprint=identity,
            model=str(name[0] if isinstance(name, list) else name),
        )
        thread = ThreadPoolExecutor(1, thread_name_prefix="stemcache-index")
        thread.submit(index.attached)
        side = SchedulerSide(
            index,
            thread,
            self._layout,
            self._num_ranks,
            timeout_s=self._settings.call_timeout_s,
            inline_wait_s=self._settings.inline_wait_s,
            pause_s=self._settings.pause_s,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
        )
        logger.info("Stemcache: fingerprint %s, groups %s", identity.hex()[:16], self._layout.groups)
        return side

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: a page that is not saved is a miss later."""
        return False

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        assert self._scheduler is not None
        return Orders(self._scheduler.step(_scheduled(scheduler_output), _new_blocks(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler.reported(connector_output.kv_connector_worker_meta.step)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_open_saves()

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        settings, rank = self._settings, get_tensor_model_parallel_rank()
        self._worker = WorkerSide(
            make_store(settings, self._layout, rank),
            PageCopies(self._layout, kv_caches),
            self._layout,
            rank,
            max_staged_bytes=settings.max_staged_mb << 20,
            load_threads=settings.load_threads,
            save_threads=settings.save_threads,
        )

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders.step

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls it before each forward pass."""
        assert isinstance(kv_connector_metadata, Orders) and self._worker is not None
        self._worker.before_forward(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: the pass has no request whose pages are still being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: pages are copied after the pass."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.after_forward(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        results = self._worker.take_results()
        self._bad_blocks = results.bad_blocks
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> Reports | None:
        assert self._worker is not None
        reports = self._worker.take_reports()
        return Reports(reports) if reports else None

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def _scheduled(output: Any) -> Iterator[Scheduled]:
    """Yields the requests of a step, with the block tables that they have now."""
    tables = output.kv_connector_block_state
    cached = output.scheduled_cached_reqs
    computed = [(one.req_id, one.num_computed_tokens) for one in output.scheduled_new_reqs]
    computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, first in computed:
        end = first + output.num_scheduled_tokens[request_id]
        states = [BoundaryState(*one) for one in tables.boundary_state_offloads.get(request_id, ())]
        yield Scheduled(request_id, first, end, tables.get_block_ids(request_id), states)


def _new_blocks(output: Any) -> Iterator[int]:
    """Yields blocks that the step may write anew. Those of a new request's local hit are among them; that is
    harmless."""
    given = [one.block_ids for one in output.scheduled_new_reqs] + output.scheduled_cached_reqs.new_block_ids
    for groups in given:
        for group in groups or ():
            yield from group
