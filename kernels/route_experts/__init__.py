"""route_experts: which experts each token goes to, and with which weights, from its router's logits.

A token's experts depend on its own logits alone, and equal ones are taken in ascending order of their ids.
"""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.route_experts import reference
from kernels.route_experts.routing import Routing, RoutingRule, Scoring

__all__ = ["Routing", "RoutingRule", "Scoring", "route_experts"]

# One program holds a row.
MAX_EXPERTS = 1024


def route_experts(
    logits: torch.Tensor,
    rule: RoutingRule,
    selection_bias: torch.Tensor | None = None,
    *,
    expert_ids: torch.Tensor | None = None,
    fused_shared: bool = False,
    backend: Backend = Backend.AUTO,
) -> Routing:
    """Returns the top_k experts of each row of logits [num_tokens, num_experts], which may be slices of wider rows.

    `selection_bias` fp32 [num_experts] is added to the scores for the choice, never to the weights. Without it, and
    unless groups are ranked by sums, experts are ranked by their logits, which are in the scores' order: so no rounding
    makes two of them equal. A NaN ranks as minus infinity: ids are distinct and in range whatever the logits are.
    expert_ids int32 [num_tokens, top_k] are taken as they are: nothing is chosen, and their scores make the weights.
    With `fused_shared` each token has a last expert more, num_experts, with a weight of 1: the shared expert of a layer
    that computes it with the others.
    """
    check_tensor("logits", logits, (None, None), KV_DTYPES, logits.device)
    check_rows("logits", logits)
    num_tokens, num_experts = logits.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise KernelArgumentError(f"logits: must be of 1 to {MAX_EXPERTS} experts, got {num_experts}")
    rule.check(num_experts)
    if selection_bias is not None:
        check_dense("selection_bias", selection_bias, (num_experts,), (torch.float32,), logits.device)
    if fused_shared and expert_ids is not None:
        raise KernelArgumentError("fused_shared: experts that are given are no choice that one could be added to")
    size = (num_tokens, rule.top_k + fused_shared)
    if expert_ids is None:
        ids = torch.empty(size, dtype=torch.int32, device=logits.device)
    else:
        check_dense("expert_ids", expert_ids, size, (torch.int32,), logits.device)
        ids = expert_ids
    routing = Routing(ids, torch.empty(size, dtype=torch.float32, device=logits.device))
    if num_tokens and uses_triton(backend, logits):
        from kernels.route_experts.triton import launch

        launch(logits, rule, selection_bias, routing, expert_ids is None)
    elif num_tokens:
        reference.route_experts(logits, rule, selection_bias, routing, expert_ids is None)
    return routing
