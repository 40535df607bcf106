"""Launches decode_attention's Gluon kernel: sizes of its ring and its registers, descriptors of the pages."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import AttentionSpec
from kernels.decode_attention.call import DecodeCall
from kernels.decode_attention.hopper.kernel import decode_pages
from kernels.decode_attention.plan_buffers import DecodePlan
from kernels.decode_attention.tree_sizes import LEAF, LEAVES_PER_GROUP, TILE
from kernels.layout import KvLayout
from kernels.softmax import LOG2_E

# Bytes of a program's ring, by the number of programs on a multiprocessor. With more in flight the queue to memory only
# gets longer; one program alone is fastest with less than two together.
RING_BYTES = {1: 96 << 10, 2: 64 << 10}
MAX_REGISTERS = {1: 248, 2: 128}
TREE = {"TILE": TILE, "LEAF": LEAF, "LEAVES_PER_GROUP": LEAVES_PER_GROUP}
# What one program may take of a multiprocessor's shared memory, less a reserve for barriers.
SHARED_BYTES = (227 << 10) - 1024


def parked_levels(columns: int, dim: int) -> int:
    """Returns how many upper levels of the tree registers have no room for."""
    return 0 if columns <= 16 or dim <= 64 else 1 if dim <= 128 else 2


def num_stages(ring_bytes: int, columns: int, dim: int, element_size: int) -> int:
    """Tiles of K and of V on their way at once: a ring's worth, or what the rest leaves of shared memory."""
    rest = 4 * parked_levels(columns, dim) * columns * dim + 2 * columns * (dim + TILE)
    return max(2, min(ring_bytes, SHARED_BYTES - rest) // (2 * TILE * dim * element_size))


def launch(call: DecodeCall, plan: DecodePlan | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked arguments and a prepared plan (None: one of its own is made).

    More rows than a product's columns take several launches.
    """
    q, k_pages, v_pages, spec, num_seqs = call.q, call.k_pages, call.v_pages, call.spec, call.num_seqs
    shape, group, scales, sinks, tables = spec.shape, spec.group, spec.scales, call.sinks, call.block_tables
    if plan is None:
        sizes = (num_seqs, call.max_seqlen_k, spec.q_heads, shape.heads, shape.dim)
        plan = DecodePlan(*sizes, max_q_tokens=call.max_q_tokens, window=spec.window, device=q.device)
        plan.prepare(call.seqlens_k)
    tokens = min(call.max_q_tokens, plan.tokens)
    per_multiprocessor = plan.programs_per_multiprocessor(num_seqs)
    columns = max(16, 1 << (tokens * group - 1).bit_length())
    buffers = (plan.acc, plan.row_max, plan.row_sum, plan.splits, plan.arrivals, plan.work)
    with torch.cuda.device_of(q):
        for token_first in range(0, call.max_q_tokens, tokens):
            decode_pages[(plan.programs(num_seqs),)](
                *(_page_descriptor(pages, spec) for pages in (k_pages, v_pages)),
                k_pages.stride(0) // spec.row_elements,
                v_pages.stride(0) // spec.row_elements,
                q,
                *q.stride()[:2],
                out,
                *out.stride()[:2],
                lse if lse is not None else out,
                out.shape[0],
                sinks if sinks is not None else out,
                *((out, out) if scales is None else (scales.k, scales.v)),
                *buffers,
                call.spans_or_any,
                tables,
                tables.stride(0),
                token_first,
                2.0 * LOG2_E * spec.scale / spec.softcap if spec.softcap else spec.scale * LOG2_E,
                spec.softcap * LOG2_E,
                HEADS=shape.heads,
                GQA_GROUP=group,
                TOKENS=tokens,
                HAS_SPANS=call.cu_seqlens_q is not None,
                COLUMNS=columns,
                ROWS=plan.rows,
                D=shape.dim,
                PAGE=shape.page_tokens,
                BY_HEAD=spec.layout is KvLayout.HND,
                **TREE,
                STAGES=num_stages(RING_BYTES[per_multiprocessor], columns, shape.dim, k_pages.element_size()),
                PARKED=parked_levels(columns, shape.dim),
                WINDOW=spec.window,
                PLANNED=plan.planned_tokens,
                SOFTCAP=spec.softcap > 0.0,
                HAS_SINKS=sinks is not None,
                HAS_SCALES=scales is not None,
                WANTS_LSE=lse is not None,
                PLACED=plan.is_placed(num_seqs),
                num_warps=4,
                maxnreg=MAX_REGISTERS[per_multiprocessor],
                launch_pdl=True,
            )


def _page_descriptor(pages: torch.Tensor, spec: AttentionSpec) -> TensorDescriptor:
    """A pool as a matrix of slots; a box is a page's slots of one head, or a tile of a larger page."""
    width, dim = spec.row_elements, spec.shape.dim
    slots = spec.shape.page_tokens * (1 if spec.layout is KvLayout.NHD else spec.shape.heads)
    rows = (pages.shape[0] - 1) * (pages.stride(0) // width) + slots
    dtype = gl.float8e4nv if pages.element_size() == 1 else gl.bfloat16
    box = [min(spec.shape.page_tokens, TILE), dim]
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor(pages, [rows, width], [width, 1], box, layout)
