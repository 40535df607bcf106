"""Launches prefill_attention's Gluon kernel: descriptors of queries and pages, and compile-time constants."""

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import AttentionSpec
from kernels.device import num_multiprocessors
from kernels.layout import KvLayout
from kernels.prefill_attention.call import PrefillCall
from kernels.prefill_attention.hopper import (
    TILE_ROWS,
    halves_tiles,
    holds_queries,
    key_block,
    num_stages,
    padded_dim,
)
from kernels.prefill_attention.hopper.few import takes
from kernels.prefill_attention.hopper.few.launch import launch_few
from kernels.prefill_attention.hopper.kernel import attend_tiles
from kernels.prefill_attention.plan import PrefillPlan
from kernels.softmax import LOG2_E


def launch(call: PrefillCall, plan: PrefillPlan | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked, non-empty arguments and a prepared plan (None: one of its own is made)."""
    plan = plan or own_plan(call, out)
    if plan.few is not None and takes(call.spec, out.shape[0], call.num_seqs):
        launch_few(call, plan.records, plan.few, out, lse)
    else:
        launch_tiles(call, plan, out, lse)


def launch_tiles(call: PrefillCall, plan: PrefillPlan, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Computes the tiles of a prepared plan."""
    halves = halves_tiles(call.spec)
    most_items = plan.records.shape[0] * call.spec.shape.heads * (2 if halves else 1)
    num_programs = min(num_multiprocessors(out.device), most_items)
    with torch.cuda.device_of(out):
        attend_tiles[(num_programs,)](
            *tensors(call, out, lse),
            plan.records,
            plan.count,
            *numbers(call, out),
            **constants(call, lse),
            WINDOW=call.spec.window,
            HALVES=halves,
        )


def own_plan(call: PrefillCall, out: torch.Tensor) -> PrefillPlan:
    """A plan of these lengths alone, prepared."""
    spec, sizes = call.spec, (call.num_seqs, out.shape[0])
    heads = (spec.q_heads, spec.shape.heads, spec.shape.dim)
    plan = PrefillPlan(*sizes, *heads, device=out.device, segment_tokens=call.segment_tokens)
    plan.prepare(call.cu_seqlens_q, call.cu_seqlens_k)
    return plan


def tensors(call: PrefillCall, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, ...]:
    """The kernels' first arguments: what they read and write of a call."""
    spec, block = call.spec, key_block(call.spec.shape.dim)
    return (
        _query_descriptor(call.q, spec.group),
        _page_descriptor(call.k_pages, spec, block),
        _page_descriptor(call.v_pages, spec, block),
        out,
        lse if lse is not None else out,
        call.sinks if call.sinks is not None else out,
        spec.scales.k if spec.scales else out,
        spec.scales.v if spec.scales else out,
        call.block_tables,
    )


def numbers(call: PrefillCall, out: torch.Tensor) -> tuple[float | int, ...]:
    """The kernels' last arguments: scales, sizes and strides."""
    spec = call.spec
    return (
        (spec.softcap or spec.scale) * LOG2_E,
        2.0 * LOG2_E * spec.scale / spec.softcap if spec.softcap else 0.0,
        out.shape[0],
        call.block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        call.k_pages.stride(0) // spec.row_elements,
        call.v_pages.stride(0) // spec.row_elements,
    )


def constants(call: PrefillCall, lse: torch.Tensor | None) -> dict[str, Any]:
    """What the kernels are compiled for, beside their windows and segments."""
    spec, shape = call.spec, call.spec.shape
    return {
        "HEADS": shape.heads,
        "GQA_GROUP": spec.group,
        "DIM": shape.dim,
        "D": padded_dim(shape.dim),
        "PAGE": shape.page_tokens,
        "HND": spec.layout is KvLayout.HND,
        "PACKED": call.q.dim() == 4,
        "CAP": spec.softcap > 0.0,
        "BN": key_block(shape.dim),
        "STAGES": num_stages(spec),
        "Q_REGISTERS": holds_queries(spec),
        "WANTS_LSE": lse is not None,
        "HAS_SINKS": call.sinks is not None,
        "SCALES": spec.scales is not None,
        "num_warps": 4,
        # Only what is written as fma is one: copies of the loop's arithmetic round alike.
        "enable_fp_fusion": False,
    }


def _query_descriptor(q: torch.Tensor, group: int) -> TensorDescriptor:
    """Boxes of 64 rows: of packed queries as they lie, else of 64 / group tokens with one kv head's query heads.

    Here and below, what a box has beyond the head dim is filled with zeros.
    """
    dim = padded_dim(q.shape[-1])
    if q.dim() == 4:
        rows = q.view(-1, q.shape[3])
        return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [TILE_ROWS // 2, dim], _shared(2))
    box = [TILE_ROWS // 2 // group, group, dim]
    return TensorDescriptor(q, list(q.shape), list(q.stride()), box, _shared(3))


def _page_descriptor(pages: torch.Tensor, spec: AttentionSpec, block: int) -> TensorDescriptor:
    """Pages as rows: of a slot's heads (NHD), or of one head, the slots of a page's first, of its second, ... (HND)."""
    width, shape = spec.row_elements, spec.shape
    rows = ((shape.num_pages - 1) * pages.stride(0) + pages[0].numel()) // width
    slots, dim, bits = min(shape.page_tokens, block), padded_dim(shape.dim), 8 * pages.element_size()
    if dim == shape.dim:
        return TensorDescriptor(pages, [rows, width], [width, 1], [slots, dim], _shared(2, bits))
    sizes, strides = [rows, width // shape.dim, shape.dim], [width, shape.dim, 1]
    return TensorDescriptor(pages, sizes, strides, [slots, 1, dim], _shared(3, bits))


def _shared(rank: int, element_bits: int = 16) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=element_bits, rank=rank)
