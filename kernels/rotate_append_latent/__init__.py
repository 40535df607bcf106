"""rotate_append_latent: from the outputs of a layer's GEMMs to what latent attention reads, in one launch.

Latents are normalised, rotary parts of queries and keys turned by their positions, latents and rotary keys put into
their slots.
"""

import torch

from kernels._checks import KV_DTYPES, check_appended, check_dense, check_dense_pages, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.rotate_append_latent import reference
from kernels.rotate_append_latent.call import RotateAppendLatentCall

__all__ = ["rotate_append_latent"]


def rotate_append_latent(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
    backend: Backend = Backend.AUTO,
) -> None:
    """Turns the last `rope` elements of each head of q in place, and writes each token's row of the cache.

    q [num_tokens, heads, nope + rope] and kv [num_tokens, latent + rope], rows may be slices of wider ones, of one and
    the same too; positions int32 or int64 [num_tokens]; cos_sin fp32 [max_positions, 2, rope / 2], cosines before
    sines: element i turns with element i + rope / 2. pages [num_pages, page_tokens, latent + rope] in kv's dtype, each
    page dense; slot_mapping int64 [num_tokens], page_id * page_tokens + offset: a token with a negative slot writes no
    row, its q is turned all the same. Two tokens must not name one slot. cos_sin None: nothing turns, q stays as it is,
    and a row's last elements, an even number of them, are kv's.

    A row is the latent, kv's first elements through a root-mean-square norm with weight `norm` [latent] (kv's dtype or
    fp32), and kv's last elements, turned. Both are computed in fp32 and rounded once.
    """
    call = RotateAppendLatentCall(q, kv, positions, cos_sin, pages, slot_mapping, norm, eps)
    _check(call)
    if q.shape[0] == 0:
        return
    if uses_triton(backend, pages):
        from kernels.rotate_append_latent.triton import launch

        launch(call)
    else:
        reference.rotate_append_latent(call)


def _check(call: RotateAppendLatentCall) -> None:
    """Refuses what no implementation can work with."""
    q, kv, pages = call.q, call.kv, call.pages
    check_tensor("pages", pages, (None, None, None), KV_DTYPES, pages.device)
    check_dense_pages("pages", pages)
    check_tensor("kv", kv, (None, pages.shape[2]), (pages.dtype,), pages.device)
    tokens, width = kv.shape
    check_dense("norm", call.norm, (None,), (kv.dtype, torch.float32), kv.device)
    if call.cos_sin is not None:
        check_dense("cos_sin", call.cos_sin, (None, 2, None), (torch.float32,), kv.device)
    elif call.rope % 2:
        raise KernelArgumentError(f"kv: the {call.rope} elements behind the latent must be an even number")
    if call.latent == 0 or call.rope == 0 or call.latent + call.rope != width:
        raise KernelArgumentError(
            f"kv: rows of {width} are not a latent of {call.latent} (norm) and {call.rope} that turn (cos_sin)"
        )
    check_tensor("q", q, (tokens, None, None), (kv.dtype,), kv.device)
    if q.shape[1] == 0 or q.shape[2] < call.rope:
        raise KernelArgumentError(f"q: needs heads of at least the {call.rope} that turn, got {list(q.shape)}")
    check_appended(q, kv, call.positions, call.slot_mapping, pages, "kv")
