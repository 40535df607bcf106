"""decode_attention for Hopper: which cases its Gluon kernel takes.

What decides is what stays the same for as long as a model is loaded.
"""

import torch

from kernels.attention import AttentionSpec
from kernels.backend import is_hopper
from kernels.fp8 import E4M3, ScaleKind
from kernels.layout import KvLayout

__all__ = ["reason_against"]

HEAD_DIMS = (64, 128, 256)
PAGE_TOKENS = (16, 32, 64, 128, 256)
MAX_GROUP = 16
MAX_ROWS = 2**31


def reason_against(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, spec: AttentionSpec) -> str | None:
    """Returns why a case is not for the Gluon kernel, None if it is."""
    shape = spec.shape
    if not is_hopper(q.device):
        return f"needs a Hopper GPU, the tensors are on {q.device}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"needs queries of bfloat16 or float16, got {q.dtype}"
    if spec.layout is KvLayout.SHUFFLE:
        return "needs pages in layout NHD or HND, got SHUFFLE"
    if shape.dim not in HEAD_DIMS or shape.page_tokens not in PAGE_TOKENS:
        return f"needs dim of {HEAD_DIMS} and page_tokens of {PAGE_TOKENS}, got {shape.dim} and {shape.page_tokens}"
    if spec.group > MAX_GROUP or spec.scale <= 0.0:
        return f"needs groups up to {MAX_GROUP} and a positive scale, got {spec.group} and {spec.scale}"
    if k_pages.dtype is E4M3 and (spec.scales is None or spec.scales.kind is not ScaleKind.PER_TENSOR):
        return "needs one scale for a tensor of fp8 pages"
    return _reason_against_pool(k_pages, spec) or _reason_against_pool(v_pages, spec)


def _reason_against_pool(pages: torch.Tensor, spec: AttentionSpec) -> str | None:
    """TMA sees the pool as a matrix whose rows are slots; int32 must number them."""
    width = spec.row_elements
    if pages.stride(0) % width or pages.data_ptr() % 16:
        return f"needs pages {width} elements apart and aligned to 16 bytes, stride is {pages.stride(0)}"
    if pages.shape[0] * (pages.stride(0) // width) >= MAX_ROWS:
        return f"needs fewer than {MAX_ROWS} rows of slots"
    return None
