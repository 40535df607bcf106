"""prefill_attention in Gluon for Hopper: one producer warp, two consumer warpgroups, a persistent list of tiles.

Knows nothing of chunks. Key tiles start at absolute multiples of BN, every tile passes through one loop body, and a
tile that a row does not see leaves that row's state bit for bit as it was: so a token's result does not depend on how
its prompt was cut, on its place in the tile or on who shares its batch.

    producer     Q of the next tile; K, V of key tile i: one TMA box for each page, into rows of one wgmma operand
    consumers    64 rows each:   QK(i) and PV(i - 1) run on the tensor cores, while softmax(i - 1) becomes softmax(i)

    rows of a tile: BM // GROUP queries, each with its GROUP query heads, so that they share the tile's keys
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import AttentionSpec
from kernels.hopper.barriers import make_barriers
from kernels.layout import KvLayout
from kernels.prefill_attention.hopper import TILE_ROWS, holds_queries, key_block, num_stages, padded_dim, row_elements
from kernels.prefill_attention.hopper.consumer import consume
from kernels.prefill_attention.hopper.producer import produce, widen
from kernels.softmax import LOG2_E


@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_tiles(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, sinks_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, records_ptr, count_ptr,
    scale_log2, cap_log2, num_tokens, stride_tables_seq, stride_out_token, stride_out_head, k_page_rows, v_page_rows,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    HND: gl.constexpr, PACKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, SCALES: gl.constexpr,
    Q_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Allocates what producer and consumers share, and starts them."""
    DTYPE: gl.constexpr = q_desc.dtype
    PAGE_DTYPE: gl.constexpr = k_desc.dtype
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if PACKED:
        q_in = gl.allocate_shared_memory(DTYPE, [2, 64, D], q_desc.layout)
    else:
        q_in = gl.allocate_shared_memory(DTYPE, [2, 64 // GROUP, GROUP, D], q_desc.layout)
    qs = q_in if PACKED else q_in._reinterpret(DTYPE, [2, 64, D], rows)
    if DIM < D:
        k_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, 1, D], k_desc.layout)
        v_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, 1, D], v_desc.layout)
    else:
        k_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, D], k_desc.layout)
        v_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, D], v_desc.layout)
    tiles: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=PAGE_DTYPE.primitive_bitwidth, rank=2
    )
    ks = k_in._reinterpret(PAGE_DTYPE, [STAGES, BN, D], tiles)
    vs = v_in._reinterpret(PAGE_DTYPE, [STAGES, BN, D], tiles)
    k_codes = ks
    v_codes = vs
    board = gl.allocate_shared_memory(gl.int32, [5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # The queries are there when the copy engine says so, and with them the board, by its writer.
    q_full = make_barriers(1, 2)
    q_empty = make_barriers(1, 3 if SCALES else 2)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, 2)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, 2)
    k_in_full = k_full
    k_in_empty = k_empty
    v_in_full = v_full
    v_in_empty = v_empty
    if SCALES:
        # fp16 holds every code, and takes a fraction of the instructions that bf16 takes.
        ks = gl.allocate_shared_memory(gl.float16, [STAGES, BN, D], rows)
        vs = gl.allocate_shared_memory(gl.float16, [STAGES, BN, D], rows)
        k_in_full = make_barriers(STAGES, 1)
        k_in_empty = make_barriers(STAGES, 1)
        v_in_full = make_barriers(STAGES, 1)
        v_in_empty = make_barriers(STAGES, 1)
    # One expression: what passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (consume, (
                out_ptr, lse_ptr, sinks_ptr, k_scales_ptr, v_scales_ptr, scale_log2, cap_log2, num_tokens,
                stride_out_token, stride_out_head, qs, ks, vs, board, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                gl.constexpr(role), HEADS, GROUP, DIM, D, WINDOW, CAP, BN, STAGES, WANTS_LSE, HAS_SINKS, SCALES,
                Q_REGISTERS,
            ))
            if role < 2
            else (widen, (
                board, q_full, q_empty, k_codes, v_codes, k_in_full, k_in_empty, v_in_full, v_in_empty,
                ks, vs, k_full, k_empty, v_full, v_empty, GROUP, D, WINDOW, BN, STAGES,
            ))
            if role == 2
            else (produce, (
                q_desc, k_desc, v_desc, tables_ptr, stride_tables_seq, records_ptr, count_ptr, num_tokens,
                k_page_rows, v_page_rows, q_in, k_in, v_in, board, q_full, q_empty,
                k_in_full, k_in_empty, v_in_full, v_in_empty,
                HEADS, GROUP, D, PAGE, HND, PACKED, DIM < D, WINDOW, BN, STAGES,
            ))
            for role in ((0, 1, 2, 3) if SCALES else (0, 1, 3))
        ],
        [4, 4, 1] if SCALES else [4, 1],
        [208, 40, 48] if SCALES else [224, 56] if PAGE < 16 else [232, 40] if DIM < D or D > 128 else [240, 32],
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    records: torch.Tensor,
    count: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launches over checked, non-empty arguments and the work list of their lengths."""
    shape, group = spec.shape, spec.group
    block = key_block(shape.dim)
    num_programs = min(_num_multiprocessors(q.device), records.shape[0] * shape.heads)
    scale = spec.softcap if spec.softcap else spec.scale
    with torch.cuda.device_of(q):
        attend_tiles[(num_programs,)](
            _query_descriptor(q, group),
            _page_descriptor(k_pages, spec, block),
            _page_descriptor(v_pages, spec, block),
            out,
            lse if lse is not None else out,
            sinks if sinks is not None else out,
            spec.scales.k if spec.scales else out,
            spec.scales.v if spec.scales else out,
            block_tables,
            records,
            count,
            scale * LOG2_E,
            2.0 * LOG2_E * spec.scale / spec.softcap if spec.softcap else 0.0,
            out.shape[0],
            block_tables.stride(0),
            out.stride(0),
            out.stride(1),
            k_pages.stride(0) // row_elements(spec),
            v_pages.stride(0) // row_elements(spec),
            HEADS=shape.heads,
            GROUP=group,
            DIM=shape.dim,
            D=padded_dim(shape.dim),
            PAGE=shape.page_tokens,
            HND=spec.layout is KvLayout.HND,
            PACKED=q.dim() == 4,
            WINDOW=spec.window,
            CAP=spec.softcap > 0.0,
            BN=block,
            STAGES=num_stages(spec),
            Q_REGISTERS=holds_queries(spec),
            WANTS_LSE=lse is not None,
            HAS_SINKS=sinks is not None,
            SCALES=spec.scales is not None,
            num_warps=4,
            # Only what is written as fma is one: copies of the loop's arithmetic round alike.
            enable_fp_fusion=False,
        )


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
    width, shape = row_elements(spec), spec.shape
    rows = ((shape.num_pages - 1) * pages.stride(0) + pages[0].numel()) // width
    slots, dim, bits = min(shape.page_tokens, block), padded_dim(shape.dim), 8 * pages.element_size()
    if dim == shape.dim:
        return TensorDescriptor(pages, [rows, width], [width, 1], [slots, dim], _shared(2, bits))
    sizes, strides = [rows, width // shape.dim, shape.dim], [width, shape.dim, 1]
    return TensorDescriptor(pages, sizes, strides, [slots, 1, dim], _shared(3, bits))


def _shared(rank: int, element_bits: int = 16) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=element_bits, rank=rank)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
