"""project_latents on Hopper, where how many latents there are lies on the device: which cases it takes."""

import torch

from kernels.backend import is_hopper

# Columns of the depth in a box.
BLOCK_K = 64
# Bytes at whose multiples a copy's rows begin.
ALIGNED_BYTES = 16


def reason_against(latents: torch.Tensor, kv_b: torch.Tensor) -> str | None:
    """Returns why the Gluon kernel cannot take checked latents and their projection, or None when it can."""
    if not is_hopper(latents.device):
        return f"needs a Hopper GPU, the tensors are on {latents.device}"
    if latents.dtype is torch.float32:
        return "needs 16-bit latents"
    if kv_b.shape[1] % BLOCK_K:
        return f"needs a latent of whole boxes of {BLOCK_K}, got {kv_b.shape[1]}"
    rows = (latents.stride(0), kv_b.shape[0], kv_b.shape[1])
    if any(row * latents.element_size() % ALIGNED_BYTES for row in rows) or any(
        tensor.data_ptr() % ALIGNED_BYTES for tensor in (latents, kv_b)
    ):
        return f"needs rows at multiples of {ALIGNED_BYTES} bytes"
    return None
