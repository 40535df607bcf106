"""append_latent in plain torch."""

import torch


def append_latent(
    latents: torch.Tensor, rope_keys: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes every token whose slot is not negative."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, offset = slots // pages.shape[1], slots % pages.shape[1]
    pages[page, offset] = torch.cat((latents, rope_keys), dim=-1)[kept]
