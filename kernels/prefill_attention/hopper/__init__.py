"""The fast path of prefill_attention on Hopper: which cases its kernels take. `kernel` computes tiles, `segment_kernel`
segments of them, `few` tiles of few rows.

The choice depends on what is fixed for a model and its pool, so it never changes from batch to batch.
"""

import torch

from kernels.attention import AttentionSpec
from kernels.backend import is_hopper
from kernels.fp8 import ScaleKind
from kernels.layout import KvLayout

__all__ = [
    "TILE_ROWS",
    "halves_tiles",
    "holds_queries",
    "key_block",
    "num_stages",
    "padded_dim",
    "reason_against",
    "reason_against_case",
    "takes_dim",
]

TILE_ROWS = 128
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MIN_PAGE_TOKENS = 8
# The kernel masks with -1e30 and takes the largest unscaled score, so the scale must be positive and of usual size.
SCALES = (1e-6, 1e6)


def key_block(dim: int) -> int:
    """Keys of one tile: as many as shared memory and registers hold."""
    return 128 if dim <= 128 else 64


def padded_dim(dim: int) -> int:
    """The width of a tile: a power of two, zeros behind the head dim."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def num_stages(spec: AttentionSpec) -> int:
    """Key tiles on their way at once: what shared memory holds beside the queries, and beside quantized tiles."""
    return 3 if spec.shape.dim <= 128 and spec.scales is None else 2


def holds_queries(spec: AttentionSpec) -> bool:
    """Returns whether a consumer's registers have room for its queries, so that shared memory is read less.

    Small pages leave them less: the producer needs more then. The products' bits are the same either way.
    """
    return spec.shape.dim <= 128 and spec.scales is None and spec.shape.page_tokens >= 16


def halves_tiles(spec: AttentionSpec) -> bool:
    """Returns whether tiles are computed in halves where a launch has few of them. The bits are the same either way.

    A window has few keys, so little is gained. Over pages of fewer than 16 tokens, wide heads and fp8 have no registers
    left.
    """
    is_lean = padded_dim(spec.shape.dim) <= 128 and spec.scales is None
    return not spec.window and (spec.shape.page_tokens >= 16 or is_lean)


def takes_dim(dim: int, *, quantized: bool) -> bool:
    """Returns whether the kernel takes heads of this size, over pages of fp8 or of the model's dtype."""
    return dim in HEAD_DIMS and (not quantized or padded_dim(dim) == 128)


def reason_against(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, spec: AttentionSpec) -> str | None:
    """Returns why the Gluon kernel cannot take a checked case, or None when it can."""
    if not is_hopper(q.device):
        return f"needs a Hopper GPU, the tensors are on {q.device}"
    return reason_against_case(q, k_pages, v_pages, spec)


def reason_against_case(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, spec: AttentionSpec
) -> str | None:
    """The same, whatever the device."""
    shape, group = spec.shape, spec.group
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} queries"
    if spec.scales is not None and (spec.scales.kind is not ScaleKind.PER_TENSOR or padded_dim(shape.dim) != 128):
        return f"{k_pages.dtype} pages of dim {shape.dim} with scales {spec.scales.kind.name}"
    if spec.scales is None and k_pages.dtype is not q.dtype:
        return f"{k_pages.dtype} pages without scales"
    if spec.layout is KvLayout.SHUFFLE:
        return "SHUFFLE pages are not rows of one matrix"
    if shape.dim not in HEAD_DIMS:
        return f"dim {shape.dim} is none of {HEAD_DIMS}"
    if shape.page_tokens < MIN_PAGE_TOKENS or shape.page_tokens & (shape.page_tokens - 1):
        return f"page_tokens {shape.page_tokens} is no power of two from {MIN_PAGE_TOKENS} on"
    if q.dim() == 3 and (group > TILE_ROWS // 2 or group & (group - 1)):
        return f"unpacked queries in groups of {group}, which is no power of two"
    if not SCALES[0] <= spec.scale <= SCALES[1]:
        return f"scale {spec.scale} is not within {SCALES}"
    return _reason_against_strides(q, (k_pages, v_pages), spec.row_elements)


def _reason_against_strides(q: torch.Tensor, pages: tuple[torch.Tensor, ...], width: int) -> str | None:
    """What the copy engine cannot address."""
    if q.data_ptr() % 16 or any(stride % 8 for stride in q.stride()[:-1]):
        return f"queries not aligned to 16 bytes, strides {q.stride()}"
    for tensor in pages:
        if tensor.data_ptr() % 16 or tensor.stride(0) % width:
            return f"pages not aligned to rows of {width} elements, strides {tensor.stride()}"
        if tensor.shape[0] * tensor.stride(0) // width >= 2**31:
            return f"{tensor.shape[0]} pages of stride {tensor.stride(0)} have more than 2^31 rows"
    return None
