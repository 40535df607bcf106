"""How large a step each token of Mamba2 makes, as a layer's tensors give it."""

from typing import NamedTuple

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.errors import KernelArgumentError

# softplus(x) is x from here on, as in torch.
SOFTPLUS_LIMIT = 20.0


class Mamba2Steps(NamedTuple):
    """dt = softplus(raw + bias), held within `least` and `most`; g = dt a.

    raw [num_tokens, heads] of any float dtype, bias [heads] too or None for none, a [heads] fp32, negative.
    """

    raw: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    least: float = 0.0
    most: float = float("inf")

    def sizes(self, tokens: slice) -> torch.Tensor:
        """Returns dt of some tokens in fp32."""
        raw = self.raw[tokens].float()
        if self.bias is not None:
            raw = raw + self.bias.float()
        # torch's softplus gives elements at the end of a thread's share other bits; exp and log1p do not.
        small = raw.clamp(max=SOFTPLUS_LIMIT).exp_().log1p_()
        return torch.where(raw > SOFTPLUS_LIMIT, raw, small).clamp_(self.least, self.most)


def check_steps(steps: Mamba2Steps, tokens: int, heads: int, device: torch.device) -> None:
    """Refuses tensors of other heads or tokens, and limits that leave nothing."""
    check_tensor("steps.raw", steps.raw, (tokens, heads), KV_DTYPES, device)
    check_rows("steps.raw", steps.raw)
    check_dense("steps.a", steps.a, (heads,), (torch.float32,), device)
    if steps.bias is not None:
        check_dense("steps.bias", steps.bias, (heads,), KV_DTYPES, device)
    if not 0.0 <= steps.least <= steps.most:
        raise KernelArgumentError(f"steps: limits must be 0 or more, in order, got {steps.least} and {steps.most}")
