"""rotate_append_kv: from the output of a layer's qkv GEMM to what attention reads, in one launch.

Heads are normalised where the model does so, queries and keys turned by their positions, keys and values put into their
slots, queries laid out as attention wants them.
"""

from typing import NamedTuple

import torch

from kernels._checks import (
    KV_DTYPES,
    check_dense,
    check_disjoint,
    check_page_pair,
    check_pages,
    check_rows,
    check_tensor,
    check_token_indices,
)
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.fp8 import check_scales, check_written_scales
from kernels.layout import KvLayout, PageShape
from kernels.rotate_append_kv import reference
from kernels.rotate_append_kv.call import HeadNorms, Rotary, RotateAppendCall

__all__ = ["RotatedQueries", "rotate_append_kv"]


class RotatedQueries(NamedTuple):
    """Queries of the first tokens [num_tokens, q_heads, dim] (rows of the others are not written), and of the others
    packed [kv_heads, num_tokens - num_unpacked, group, dim]."""

    unpacked: torch.Tensor
    packed: torch.Tensor


def rotate_append_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    layout: KvLayout = KvLayout.NHD,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    packed_out: torch.Tensor | None = None,
    num_unpacked: int = 0,
    backend: Backend = Backend.AUTO,
) -> RotatedQueries:
    """Writes k and v to the pages; queries of tokens below num_unpacked go to `out`, the others' to `packed_out`.

    qkv [num_tokens, q_heads + 2 * kv_heads, dim], rows may be slices of wider ones; positions int32 or int64
    [num_tokens]; cos_sin fp32 [max_positions, 2, rotary_dim / 2], cosines before sines: the first rotary_dim elements
    of a head turn, element i with element i + rotary_dim / 2. q_norm, k_norm [dim], both in qkv's dtype or in fp32:
    weights of a root-mean-square norm of each head before that. The norm, and then the rotation, are computed in fp32
    and rounded to qkv's dtype.

    slot_mapping, k_scales and v_scales are append_kv's; a token with a negative slot still has its query written.
    Outputs that are not given are made.
    """
    shape = check_pages(k_pages, v_pages, layout)
    check_page_pair(k_pages, v_pages)
    _check_queries(qkv, q_heads, shape, k_pages.device)
    tokens = qkv.shape[0]
    check_token_indices(positions, slot_mapping, tokens, qkv.device)
    rotary = _checked_rotary(cos_sin, shape.dim, qkv.device)
    norms = _checked_norms(q_norm, k_norm, eps, qkv)
    scales = check_scales(k_scales, v_scales, k_pages, qkv.dtype, shape)
    check_written_scales(scales, qkv, qkv)
    check_disjoint("k_pages", k_pages, "qkv", qkv)
    check_disjoint("v_pages", v_pages, "qkv", qkv)
    queries = _queries(qkv, q_heads, shape, out, packed_out, num_unpacked)
    _check_apart(out, packed_out, {"qkv": qkv, "k_pages": k_pages, "v_pages": v_pages})
    if qkv.numel() == 0:
        return queries
    where = (k_pages, v_pages, slot_mapping, scales, shape, layout)
    call = RotateAppendCall(qkv, positions, rotary, norms, *where, *queries, num_unpacked)
    if uses_triton(backend, qkv):
        from kernels.rotate_append_kv.triton import launch

        launch(call)
    else:
        reference.rotate_append_kv(call)
    return queries


def _check_queries(qkv: torch.Tensor, q_heads: int, shape: PageShape, device: torch.device) -> None:
    if q_heads < 1 or q_heads % shape.heads:
        raise KernelArgumentError(f"q_heads: must be a multiple of the pages' {shape.heads} heads, got {q_heads}")
    check_tensor("qkv", qkv, (None, q_heads + 2 * shape.heads, shape.dim), KV_DTYPES, device)
    check_rows("qkv", qkv)


def _checked_rotary(cos_sin: torch.Tensor, dim: int, device: torch.device) -> Rotary:
    check_dense("cos_sin", cos_sin, (None, 2, None), (torch.float32,), device)
    rotary_dim = 2 * cos_sin.shape[2]
    if not 0 < rotary_dim <= dim:
        raise KernelArgumentError(f"cos_sin: turns {rotary_dim} elements of heads that have {dim}")
    return Rotary(cos_sin, rotary_dim)


def _checked_norms(
    q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float, qkv: torch.Tensor
) -> HeadNorms | None:
    if q_norm is None and k_norm is None:
        return None
    if q_norm is None or k_norm is None:
        raise KernelArgumentError(f"{'q_norm' if q_norm is None else 'k_norm'}: the other norm needs it, got None")
    # Both of one dtype: the kernel picks one of two pointers.
    dtypes = {"q_norm": (qkv.dtype, torch.float32), "k_norm": (q_norm.dtype,)}
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        check_dense(name, weight, (qkv.shape[2],), dtypes[name], qkv.device)
    return HeadNorms(q_norm, k_norm, eps)


def _check_apart(out: torch.Tensor | None, packed_out: torch.Tensor | None, others: dict[str, torch.Tensor]) -> None:
    """Only outputs that were given can share memory with anything."""
    for name, written in (("out", out), ("packed_out", packed_out)):
        if written is not None:
            for other, tensor in others.items():
                check_disjoint(name, written, other, tensor)
    if out is not None and packed_out is not None:
        check_disjoint("packed_out", packed_out, "out", out)


def _queries(
    qkv: torch.Tensor,
    q_heads: int,
    shape: PageShape,
    out: torch.Tensor | None,
    packed_out: torch.Tensor | None,
    num_unpacked: int,
) -> RotatedQueries:
    tokens = qkv.shape[0]
    if not 0 <= num_unpacked <= tokens:
        raise KernelArgumentError(f"num_unpacked: must be within 0..{tokens}, got {num_unpacked}")
    sizes = ((tokens, q_heads, shape.dim), (shape.heads, tokens - num_unpacked, q_heads // shape.heads, shape.dim))
    made = [
        torch.empty(size, dtype=qkv.dtype, device=qkv.device) if given is None else given
        for size, given in zip(sizes, (out, packed_out), strict=True)
    ]
    for name, given, size in (("out", out, sizes[0]), ("packed_out", packed_out, sizes[1])):
        if given is not None:
            check_dense(name, given, size, (qkv.dtype,), qkv.device)
    return RotatedQueries(*made)
