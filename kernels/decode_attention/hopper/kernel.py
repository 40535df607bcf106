"""decode_attention in Gluon for sm_90: persistent programs stream pages by TMA and sum along a fixed tree.

Knows nothing of the batch beyond its plan. The arithmetic is a tree over a sequence's own key positions; who computes
which part, and whether a part waits in memory or in registers, cannot change a bit:

    tiles of 64 keys -> leaves of 512, each a fresh softmax state -> groups of 4 leaves -> the sequence
                        folded in fp32, in ascending order, by one formula at every level

Keys are the rows of both products and query heads their columns (K Q' and V' P'): the few heads that share a kv head
then cost a few columns instead of a padded tile of 64 rows, and three levels of the tree fit in registers. Where there
are more columns, the upper levels' accumulators wait in shared memory between folds.

fp8 codes become fp16 numbers in registers, on their way into the products (codes.py); the sums are the same.

Three partitions of a program: one warp streams K, one streams V, four compute. A pair (sequence, kv head) that lies
within one chunk is finished in registers; otherwise each unit leaves its partial in memory, and the program that
arrives last merges them. Counters return to zero, so that a captured graph can replay.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import AttentionSpec
from kernels.decode_attention.hopper import TILE, row_elements
from kernels.decode_attention.hopper.attend import attend
from kernels.decode_attention.hopper.stream import stream_pages
from kernels.decode_attention.plan import GROUP, LEAF, DecodePlan
from kernels.hopper.barriers import make_barriers
from kernels.layout import KvLayout
from kernels.softmax import LOG2_E

# Bytes of a program's ring, by the number of programs on a multiprocessor. With more in flight the queue to memory only
# gets longer; one program alone is fastest with less than two together.
RING_BYTES = {1: 96 << 10, 2: 64 << 10}
MAX_REGISTERS = {1: 248, 2: 128}
# What one program may take of a multiprocessor's shared memory, less a reserve for barriers.
SHARED_BYTES = (227 << 10) - 1024


@gluon.jit(do_not_specialize=["num_tokens", "token_first", "num_seqs", "stride_tables_seq"])
def decode_pages(
    k_desc,
    v_desc,
    k_page_rows,
    v_page_rows,
    q_ptr,
    stride_q_token,
    stride_q_head,
    out_ptr,
    stride_out_token,
    stride_out_head,
    lse_ptr,
    num_tokens,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    bases_ptr,
    chunks_ptr,
    arrivals_ptr,
    work_ptr,
    seqlens_ptr,
    cu_seqlens_ptr,
    tables_ptr,
    stride_tables_seq,
    token_first,
    num_seqs,
    scale,
    cap,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    BY_HEAD: gl.constexpr,
    TILE: gl.constexpr,
    LEAF: gl.constexpr,
    LEAVES: gl.constexpr,
    STAGES: gl.constexpr,
    PARKED: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CODES: gl.constexpr = k_desc.dtype != dtype
    # Every code is a number of fp16.
    operand: gl.constexpr = gl.float16 if CODES else dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, D], operand)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS], operand)
    q_smem = gl.allocate_shared_memory(operand, [1, COLUMNS, D], q_layout)
    p_smem = gl.allocate_shared_memory(operand, [TILE, COLUMNS], p_layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, D], v_desc.layout)
    parked = p_smem
    if PARKED > 0:
        # Eight columns are what a product's registers hold of a row: so swizzled, a warp's rows lie in different banks.
        parked_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 32 // COLUMNS, COLUMNS // 8, [1, 0])
        parked = gl.allocate_shared_memory(gl.float32, [PARKED, D, COLUMNS], parked_layout)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, 1)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, 1)
    board = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    board_full = make_barriers(2, 1)
    board_empty = make_barriers(2, 2)
    value_scale = 1.0
    if HAS_SCALES:
        scale = scale * gl.load(k_scale_ptr)
        value_scale = gl.load(v_scale_ptr)
    rings = (q_smem, p_smem, k_ring, v_ring)
    barriers = (k_full, k_empty, v_full, v_empty)
    outputs = (out_ptr, lse_ptr, sinks_ptr)
    strides_out = (stride_out_token, stride_out_head, num_tokens)
    partials = (acc_ptr, peak_ptr, total_ptr)
    plan = (bases_ptr, chunks_ptr)
    lengths = (seqlens_ptr, cu_seqlens_ptr)
    factors = (scale, cap, value_scale)
    gl.warp_specialize(
        [
            (
                attend,
                (
                    q_ptr, (stride_q_token, stride_q_head), outputs, strides_out, partials, plan, arrivals_ptr, lengths,
                    token_first, num_seqs, factors, rings, barriers, board, board_full, board_empty, parked, HEADS,
                    GROUP, TOKENS, HAS_SPANS, ROWS, LEAF, LEAVES, PARKED, WINDOW, SOFTCAP, HAS_SINKS, WANTS_LSE,
                ),
            ),
            (
                stream_pages,
                (
                    k_desc, k_page_rows, k_ring, k_full, k_empty, board, board_full, board_empty, tables_ptr,
                    stride_tables_seq, seqlens_ptr, cu_seqlens_ptr, token_first, num_seqs, chunks_ptr,
                    work_ptr, HEADS, PAGE, TILE, LEAF, TOKENS, HAS_SPANS, WINDOW, BY_HEAD, True,
                ),
            ),
            (
                stream_pages,
                (
                    v_desc, v_page_rows, v_ring, v_full, v_empty, board, board_full, board_empty, tables_ptr,
                    stride_tables_seq, seqlens_ptr, cu_seqlens_ptr, token_first, num_seqs, chunks_ptr,
                    work_ptr, HEADS, PAGE, TILE, LEAF, TOKENS, HAS_SPANS, WINDOW, BY_HEAD, False,
                ),
            ),
        ],
        [1, 1],
        # Boxes of wider rows take more addresses.
        [56, 56] if D > 128 else [40, 40],
    )  # fmt: skip


def parked_levels(columns: int, dim: int) -> int:
    """How many upper levels of the tree registers have no room for."""
    return 0 if columns <= 16 or dim <= 64 else 1 if dim <= 128 else 2


def num_stages(ring_bytes: int, columns: int, dim: int, element_size: int) -> int:
    """Tiles of K and of V on their way at once: a ring's worth, or what the rest leaves of shared memory."""
    rest = 4 * parked_levels(columns, dim) * columns * dim + 2 * columns * (dim + TILE)
    return max(2, min(ring_bytes, SHARED_BYTES - rest) // (2 * TILE * dim * element_size))


def launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_q_tokens: int,
    plan: DecodePlan,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launches over checked arguments and a prepared plan; more rows than a product's columns take several launches."""
    shape, group, num_seqs = spec.shape, spec.group, seqlens_k.shape[0]
    tokens = min(max_q_tokens, plan.tokens)
    per_multiprocessor = plan.programs_per_multiprocessor(num_seqs)
    columns = max(16, 1 << (tokens * group - 1).bit_length())
    scales = spec.scales
    by_head = spec.layout is KvLayout.HND
    with torch.cuda.device_of(q):
        for token_first in range(0, max_q_tokens, tokens):
            decode_pages[(plan.programs(num_seqs),)](
                _page_descriptor(k_pages, spec),
                _page_descriptor(v_pages, spec),
                k_pages.stride(0) // row_elements(spec),
                v_pages.stride(0) // row_elements(spec),
                q,
                q.stride(0),
                q.stride(1),
                out,
                out.stride(0),
                out.stride(1),
                lse if lse is not None else out,
                out.shape[0],
                sinks if sinks is not None else out,
                scales.k if scales is not None else out,
                scales.v if scales is not None else out,
                plan.acc,
                plan.peak,
                plan.total,
                plan.bases,
                plan.chunks,
                plan.arrivals,
                plan.work,
                seqlens_k,
                cu_seqlens_q if cu_seqlens_q is not None else seqlens_k,
                block_tables,
                block_tables.stride(0),
                token_first,
                num_seqs,
                2.0 * LOG2_E * spec.scale / spec.softcap if spec.softcap else spec.scale * LOG2_E,
                spec.softcap * LOG2_E,
                HEADS=shape.heads,
                GROUP=group,
                TOKENS=tokens,
                HAS_SPANS=cu_seqlens_q is not None,
                COLUMNS=columns,
                ROWS=plan.rows,
                D=shape.dim,
                PAGE=shape.page_tokens,
                BY_HEAD=by_head,
                TILE=TILE,
                LEAF=LEAF,
                LEAVES=GROUP,
                STAGES=num_stages(RING_BYTES[per_multiprocessor], columns, shape.dim, k_pages.element_size()),
                PARKED=parked_levels(columns, shape.dim),
                WINDOW=spec.window,
                SOFTCAP=spec.softcap > 0.0,
                HAS_SINKS=sinks is not None,
                HAS_SCALES=scales is not None,
                WANTS_LSE=lse is not None,
                num_warps=4,
                maxnreg=MAX_REGISTERS[per_multiprocessor],
            )


def _page_descriptor(pages: torch.Tensor, spec: AttentionSpec) -> TensorDescriptor:
    """A pool as a matrix of slots; a box is a page's slots of one head, or a tile of a larger page."""
    width, dim = row_elements(spec), spec.shape.dim
    slots = spec.shape.page_tokens * (1 if spec.layout is KvLayout.NHD else spec.shape.heads)
    rows = (pages.shape[0] - 1) * (pages.stride(0) // width) + slots
    dtype = gl.float8e4nv if pages.element_size() == 1 else gl.bfloat16
    box = [min(spec.shape.page_tokens, TILE), dim]
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor(pages, [rows, width], [width, 1], box, layout)
