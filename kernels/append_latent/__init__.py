"""append_latent: writes the latents and rotary keys of new tokens into their slots of an MLA cache."""

import torch

from kernels._checks import (
    KV_DTYPES,
    check_contiguous,
    check_dense_pages,
    check_disjoint,
    check_rows,
    check_tensor,
)
from kernels.append_latent import reference
from kernels.backend import Backend, uses_triton

__all__ = ["append_latent"]


def append_latent(
    latents: torch.Tensor,
    rope_keys: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: Backend = Backend.AUTO,
) -> None:
    """Slot slot_mapping[t] = latents[t] followed by rope_keys[t]; a negative slot is skipped, as padding is.

    latents [num_tokens, rank], rope_keys [num_tokens, rope_dim], rows may be slices of wider ones; pages
    [num_pages, page_tokens, rank + rope_dim] in their dtype, each page dense; slot_mapping int64 [num_tokens],
    page_id * page_tokens + offset. Two tokens must not name one slot.
    """
    check_tensor("pages", pages, (None, None, None), KV_DTYPES, pages.device)
    check_dense_pages("pages", pages)
    check_tensor("latents", latents, (None, None), (pages.dtype,), pages.device)
    tokens, rank = latents.shape
    check_tensor("rope_keys", rope_keys, (tokens, pages.shape[2] - rank), (pages.dtype,), pages.device)
    check_tensor("slot_mapping", slot_mapping, (tokens,), (torch.int64,), pages.device)
    check_contiguous("slot_mapping", slot_mapping)
    for name, rows in (("latents", latents), ("rope_keys", rope_keys)):
        check_rows(name, rows)
        check_disjoint("pages", pages, name, rows)
    if tokens == 0:
        return
    if uses_triton(backend, pages):
        from kernels.append_latent.triton import launch

        launch(latents, rope_keys, pages, slot_mapping)
    else:
        reference.append_latent(latents, rope_keys, pages, slot_mapping)
