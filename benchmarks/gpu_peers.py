"""Other open kernels for paged attention that a machine may have; torch's own stand beside the ops.

A kernel that is not installed is no peer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from benchmarks.measurement import Peer, Work
from tests.kernels.inputs import PagedCase

WORKSPACE_BYTES = 256 << 20
BACKENDS = ("fa3", "fa2")
DECODE_BACKENDS = ("fa2", "fa3", "cudnn")

Peers = tuple[Peer, ...]


def made_by_flashinfer(make: Callable[..., Peers]) -> Callable[..., Peers]:
    """`make` gets FlashInfer as its first argument; where that is not installed, there is no peer."""

    @wraps(make)
    def peers(*arguments: Any) -> Peers:
        if find_spec("flashinfer") is None:
            return ()
        return make(import_module("flashinfer"), *arguments)

    return peers


def flex_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, amount: float) -> Peer:
    """FlexAttention over the whole causal square of contiguous [batch, heads, tokens, dim]."""
    tokens = q.shape[2]
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cuda")
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
    return Peer("flex_attention", partial(compiled, q, k, v, block_mask=mask, enable_gqa=True), amount)


@made_by_flashinfer
def flashinfer_prefill(flashinfer: Any, case: PagedCase, amount: float) -> Peers:
    """FlashInfer's two paged prefills, planned beforehand as once a step."""
    make = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    return tuple(
        _prefill_peer(make(workspace(), "NHD", backend=backend), backend, case, amount) for backend in BACKENDS
    )


def _prefill_peer(wrapper: Any, backend: str, case: PagedCase, amount: float) -> Peer:
    sizes = (*_heads(case), case.page_tokens)
    wrapper.plan(case.cu_seqlens_q, *_page_lists(case), *sizes, causal=True, q_data_type=case.q.dtype)
    return Peer(f"flashinfer_{backend}", _call(wrapper, case), amount)


@made_by_flashinfer
def flashinfer_decode(flashinfer: Any, case: PagedCase, amount: float) -> Peers:
    """FlashInfer's paged decodes, planned beforehand: on tensor cores, by cuDNN over pages, and xqa."""
    wrapper = partial(flashinfer.BatchDecodeWithPagedKVCacheWrapper, kv_layout="NHD", use_tensor_cores=True)
    makers = {f"flashinfer_{backend}": partial(_planned_decode, wrapper, backend, case) for backend in DECODE_BACKENDS}
    makers["flashinfer_xqa"] = partial(_xqa_decode, flashinfer, case)
    return tuple(Peer(name, _made(make), amount) for name, make in makers.items())


def _made(make: Callable[[], Work]) -> Work:
    """Returns what `make` returns, or work that fails as `make` did: the row of a missing backend says why."""
    try:
        return make()
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError, OSError, AssertionError) as failure:
        return partial(_refuse, f"{type(failure).__name__}: {failure}")


def _refuse(complaint: str) -> None:
    raise RuntimeError(complaint)


def _planned_decode(wrapper: Any, backend: str, case: PagedCase) -> Work:
    decode = wrapper(workspace(), backend=backend)
    decode.plan(*_page_lists(case), *_heads(case), case.page_tokens, q_data_type=case.q.dtype)
    return _call(decode, case)


def _xqa_decode(flashinfer: Any, case: PagedCase) -> Work:
    """It takes lengths and block tables as they are, and plans nothing."""
    return partial(
        flashinfer.decode.xqa_batch_decode_with_kv_cache,
        case.q,
        (case.k_pages, case.v_pages),
        workspace(),
        case.block_tables,
        case.seqlens_k.to(torch.uint32),
        int(case.seqlens_k.max()),
        bmm1_scale=case.q.shape[-1] ** -0.5,
        out=torch.empty_like(case.q),
    )


@made_by_flashinfer
def flashinfer_merge(flashinfer: Any, outs: list[torch.Tensor], lses: list[torch.Tensor], amount: float) -> Peers:
    """FlashInfer's merge of two states; it takes the sums as [tokens, heads]."""
    sums = [lse.T.contiguous() for lse in lses]
    return (Peer("flashinfer", partial(flashinfer.merge_state, outs[0], sums[0], outs[1], sums[1]), amount),)


@made_by_flashinfer
def flashinfer_append(flashinfer: Any, case: PagedCase, amount: float) -> Peers:
    """FlashInfer's append of the first sequence's tokens to pages in random order."""
    k, v = case.keys[0], case.values[0]
    tokens = k.shape[0]
    pages = torch.randperm(case.k_pages.shape[0], device="cuda")[: -(-tokens // case.page_tokens)].int()
    bounds = torch.tensor([0, pages.shape[0]], dtype=torch.int32, device="cuda")
    last = torch.tensor([(tokens - 1) % case.page_tokens + 1], dtype=torch.int32, device="cuda")
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
    where = (torch.zeros_like(positions), positions)
    pools = (case.k_pages, case.v_pages)
    return (
        Peer("flashinfer", partial(flashinfer.append_paged_kv_cache, k, v, *where, pools, pages, bounds, last), amount),
    )


def _heads(case: PagedCase) -> tuple[int, int, int]:
    return case.q.shape[1], case.k_pages.shape[2], case.q.shape[2]


def workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _call(wrapper: Any, case: PagedCase) -> Work:
    """Into memory of the caller's: without `out` FlashInfer fills a new one with zeros inside the timed graph."""
    return partial(wrapper.run, case.q, (case.k_pages, case.v_pages), out=torch.empty_like(case.q))


def _page_lists(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Running sums of pages, their ids one sequence after the other, and how full each last page is: int32."""
    lengths = case.seqlens_k
    counts = -(-lengths // case.page_tokens)
    sums = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    ids = torch.cat([row[:count] for row, count in zip(case.block_tables, counts.tolist(), strict=True)]).int()
    return sums, ids, ((lengths - 1) % case.page_tokens + 1).int()
