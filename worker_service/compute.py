"""Everything of a worker that lives on its device: the model, its pages, and the runner. Made once, before the event
loop runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from kernels.backend import Backend
from worker_service.config import WorkerConfig
from worker_service.core.errors import PoolError
from worker_service.gpu.group_layout import GroupLayout
from worker_service.gpu.page_pools import PagePools
from worker_service.gpu.pool_plan import PoolDemand, check_interval, check_pool, counts_for, plan_pages, pool_budget
from worker_service.gpu.pool_report import PoolReport, pool_report
from worker_service.host_tier.allocator import keep_freed_blocks
from worker_service.model.attention import few_rows_workspace_bytes, reason_against_segments, segments_workspace_bytes
from worker_service.model.compressed_attention import compressed_workspace_bytes
from worker_service.model.device import pick_device, pick_page_dtype, prepare_process
from worker_service.model.gemm_dispatch import MOST_PADDING, Invariance
from worker_service.model.latent_attention import latent_workspace_bytes
from worker_service.model.load import LoadedModel, load_model
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import Runner, RunnerLimits
from worker_service.model.sparse_attention import sparse_workspace_bytes
from worker_service.model.spec import ModelSpec

CPU_POOL_MB = 512

_log = logging.getLogger("worker_service")


class Compute(NamedTuple):
    loaded: LoadedModel
    device: torch.device
    pools: PagePools
    invariance: Invariance
    runner: Runner
    part_bytes: int
    """Pages of more than this go to the host tier in parts of this size."""
    segment_tokens: int
    """Keys of one segment of prompts' attention; 0: all keys are one segment."""


class PageDtypes(NamedTuple):
    """Of keys and values, and of an indexer's keys; None is the model's."""

    kv: torch.dtype | None
    index_keys: torch.dtype | None


def prepare(config: WorkerConfig) -> Compute:
    """Loads the model, makes its pages, captures its graphs. Raises ModelError or PoolError."""
    try:
        return _prepare(config)
    except torch.OutOfMemoryError as error:
        raise PoolError(
            "memory_fraction, pool_mb, token_budget, max_num_seqs: the model, its pages and its captured graphs do not "
            f"fit into the device's memory together ({str(error).partition('. ')[0]})"
        ) from error


@contextmanager
def _naming(settings: str) -> Iterator[None]:
    """Raises PoolError with these settings where a CPU has no memory for what is made.

    Its allocator raises what everything else raises, too.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        asked = str(error).partition("can't allocate memory: ")[2].partition(".")[0]
        raise PoolError(f"{settings}: more than this machine's memory holds ({asked})") from error


def _prepare(config: WorkerConfig) -> Compute:
    device = pick_device(config.device)
    invariance = Invariance(config.invariance)
    page_dtypes = PageDtypes(
        pick_page_dtype("kv_dtype", config.kv_dtype, device),
        pick_page_dtype("index_key_dtype", config.index_key_dtype, device),
    )
    prepare_process(device, config.threads, stable_gemms=invariance is not Invariance.FAST)
    if config.host_tier != "none":
        keep_freed_blocks()
    backend = Backend(config.kernel_backend)
    loaded = load_model(
        config.model,
        device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        backend=backend,
        expert_weights=config.expert_weights,
    )
    pools = _make_pools(config, loaded, page_dtypes, device)
    limits = RunnerLimits(
        config.max_num_seqs,
        config.token_budget,
        invariance,
        config.cuda_graphs,
        config.latent_chunk_tokens,
        config.attention_segment_tokens,
    )
    with _naming("max_num_seqs, token_budget"):
        runner = Runner(loaded.model, pools, device, limits)
    _log_segments(config.attention_segment_tokens, loaded, page_dtypes.kv, device)
    return Compute(
        loaded, device, pools, invariance, runner, config.host_part_kb << 10, config.attention_segment_tokens
    )


def _make_pools(config: WorkerConfig, loaded: LoadedModel, page_dtypes: PageDtypes, device: torch.device) -> PagePools:
    spec, dtype = loaded.spec, loaded.model.dtype
    page_tokens = config.page_tokens or spec.page_tokens
    layouts = page_layouts(spec, dtype, page_tokens, *page_dtypes)
    demand = PoolDemand(
        page_tokens=page_tokens,
        max_model_len=spec.max_model_len,
        max_chunk_tokens=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        window_share=config.window_share,
        state_share=config.state_share,
    )
    interval = check_interval(layouts, config.state_interval_tokens, page_tokens)
    budget_bytes = _budget(config, spec, dtype, page_dtypes.index_keys, device)
    num_pages = _num_pages(config, layouts, demand, budget_bytes)
    with _naming("pool_pages" if config.pool_pages else "pool_mb"):
        pools = PagePools(layouts, num_pages, page_tokens, device, interval)
    report = pool_report(pools.specs(), page_tokens, spec.max_model_len, config.max_num_seqs)
    _log_pools(report, str(page_dtypes.kv or dtype).removeprefix("torch."))
    return pools


def _num_pages(
    config: WorkerConfig, layouts: Sequence[GroupLayout], demand: PoolDemand, budget_bytes: int
) -> tuple[int, ...]:
    if config.pool_pages:
        num_pages = counts_for(layouts, config.pool_pages, demand)
        check_pool(layouts, num_pages, demand)
        return num_pages
    return plan_pages(layouts, budget_bytes, demand)


def _budget(
    config: WorkerConfig, spec: ModelSpec, dtype: torch.dtype, index_dtype: torch.dtype | None, device: torch.device
) -> int:
    """Returns bytes for the pools: `pool_mb`, or a share of the memory that the model and its workspace leave."""
    if config.pool_mb:
        return config.pool_mb << 20
    budget = pool_budget(device, config.memory_fraction, CPU_POOL_MB << 20)
    if device.type != "cuda":
        return budget
    max_tokens = config.token_budget + MOST_PADDING
    workspace_bytes = (
        latent_workspace_bytes(spec, config.latent_chunk_tokens, max_tokens, dtype)
        + sparse_workspace_bytes(spec, max_tokens, dtype, index_dtype)
        + compressed_workspace_bytes(spec, max_tokens, dtype)
        + segments_workspace_bytes(spec, config.attention_segment_tokens, device)
        + few_rows_workspace_bytes(spec, config.attention_segment_tokens, device)
    )
    return budget - workspace_bytes


def _log_segments(
    segment_tokens: int, loaded: LoadedModel, page_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Says so where a setting of segments has no effect at all."""
    if segment_tokens and (why := reason_against_segments(loaded.spec, loaded.model.backend, page_dtype, device)):
        _log.warning("attention_segment_tokens changes nothing here", extra={"reason": why})


def _log_pools(report: PoolReport, kv_dtype: str) -> None:
    groups = [group._asdict() for group in report.groups]
    _log.info("pools made", extra={"kv_dtype": kv_dtype, "groups": groups, "least_hit_tokens": report.least_hit_tokens})
    if report.warning is not None:
        _log.warning(report.warning)
