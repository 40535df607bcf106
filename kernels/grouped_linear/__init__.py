"""grouped_linear: each token's row through the weights of its chosen experts; a row's bits are its own.

They depend on no other row: not on how many there are, which experts those chose, or how the rows lie in tiles. An
expert layer is

    ids, weights = route_experts(logits, rule)
    plan = plan_experts(ids, num_experts)
    inner = silu_mul(grouped_linear(x, gate_up, plan))                  # a row for each token and chosen expert
    out = combine_experts(grouped_linear(inner, down, plan), weights)   # a row for each token

and waits for the device nowhere, with shapes that follow from the number of tokens: a captured graph replays it.
"""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, choose_backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.grouped_linear import cpu, hopper, reference
from kernels.grouped_linear.cpu import PackedExperts
from kernels.grouped_linear.plan import TILE_ROWS, ExpertPlan, empty_plan, usual_tile_rows
from kernels.grouped_linear.some_experts import GroupedWeight, first_experts, last_expert
from kernels.grouped_linear.stored import Fp8Experts, Mxfp4Experts, StoredExperts, check_stored, dequantised
from kernels.grouped_linear.words import ExpertWords, Fp8Words, Mxfp4Words, bytes_of, check_words

__all__ = [
    "TILE_ROWS",
    "ExpertPlan",
    "Fp8Experts",
    "Fp8Words",
    "GroupedWeight",
    "Mxfp4Experts",
    "Mxfp4Words",
    "PackedExperts",
    "StoredExperts",
    "dequantised",
    "first_experts",
    "grouped_linear",
    "last_expert",
    "packed_experts",
    "plan_experts",
]

MAX_EXPERTS = 1024


def plan_experts(
    expert_ids: torch.Tensor, num_experts: int, *, tile_rows: int | None = None, backend: Backend = Backend.AUTO
) -> ExpertPlan:
    """Returns how the pairs of tokens and experts, int32 [num_tokens, top_k], are divided; once for a layer.

    A pair whose id is not 0 to num_experts - 1 is in no tile: no product writes its row. `tile_rows` is one of
    TILE_ROWS, None: by the number of pairs. It changes no bit of a product.
    """
    check_dense("expert_ids", expert_ids, (None, None), (torch.int32,), expert_ids.device)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise KernelArgumentError(f"num_experts: must be 1 to {MAX_EXPERTS}, got {num_experts}")
    if expert_ids.shape[1] == 0:
        raise KernelArgumentError("expert_ids: a token must have an expert")
    if tile_rows is None:
        tile_rows = usual_tile_rows(expert_ids.numel(), num_experts)
    elif tile_rows not in TILE_ROWS:
        raise KernelArgumentError(f"tile_rows: must be one of {TILE_ROWS}, got {tile_rows}")
    plan = empty_plan(expert_ids, num_experts, tile_rows)
    if plan.num_pairs == 0:
        plan.starts.zero_()
        plan.num_tiles.zero_()
    elif uses_triton(backend, expert_ids):
        from kernels.grouped_linear.plan_triton import launch

        launch(expert_ids, plan)
    else:
        reference.plan_experts(expert_ids, plan)
    return plan


def grouped_linear(
    x: torch.Tensor,
    weight: GroupedWeight,
    plan: ExpertPlan,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns [num_pairs, N]: for each pair of the plan its row of x times its expert's weight, plus its bias.

    x is [num_tokens, K], or [num_pairs, K] with a row for each pair; weight [num_experts, N, K], bias [num_experts, N].
    Rows of x and of the weight may be slices of wider ones. What `packed_experts` returned on a CPU takes the CPU's
    route, whatever `backend` says; without it a CPU takes the reference. A stored weight gives the same bits as what
    `dequantised` returns of it in x's dtype; with x in fp32 the reference alone takes it.
    """
    num_outputs, depth = _check_weight(weight, plan, x.device)
    dtypes = (weight.dtype,) if isinstance(weight, torch.Tensor) else KV_DTYPES
    check_tensor("x", x, (None, depth), dtypes, x.device)
    check_rows("x", x)
    if x.shape[0] not in (plan.num_pairs // plan.top_k, plan.num_pairs):
        raise KernelArgumentError(
            f"x: must have a row for each of {plan.num_pairs // plan.top_k} tokens or of {plan.num_pairs} pairs, "
            f"got {x.shape[0]}"
        )
    if bias is not None:
        check_tensor("bias", bias, (plan.num_experts, num_outputs), (x.dtype,), x.device)
        check_rows("bias", bias)
    out = x.new_empty((plan.num_pairs, num_outputs))
    if out.numel() == 0:
        return out
    if isinstance(weight, torch.Tensor | StoredExperts | ExpertWords):
        _multiply(x, weight, bias, plan, out, backend)
    else:
        cpu.grouped_linear(x, weight, bias, plan, out)
    return out


def packed_experts(
    weight: torch.Tensor | StoredExperts, backend: Backend = Backend.AUTO, *, dtype: torch.dtype = torch.bfloat16
) -> GroupedWeight:
    """Returns the weight [num_experts, N, K] as `grouped_linear` takes it best with rows of that dtype: packed for fp32
    on a CPU, a stored one in words on a Hopper GPU where these give its bits, else itself."""
    if isinstance(weight, StoredExperts):
        return hopper.packed(weight, dtype) if backend in (Backend.AUTO, Backend.GLUON) else weight
    check_tensor("weight", weight, (None, None, None), KV_DTYPES, weight.device)
    return cpu.pack(weight, backend)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor | StoredExperts | ExpertWords,
    bias: torch.Tensor | None,
    plan: ExpertPlan,
    out: torch.Tensor,
    backend: Backend,
) -> None:
    """Fills out; checked arguments. Only the Gluon kernel reads words: others get the order of the files again."""
    chosen = choose_backend(backend, x, lambda: hopper.reason_against(x, weight))
    if chosen is Backend.GLUON and isinstance(weight, Fp8Experts | ExpertWords):
        from kernels.grouped_linear.hopper.launch import launch as launch_stored

        launch_stored(x, weight, bias, plan, out)
        return
    if isinstance(weight, ExpertWords):
        weight = bytes_of(weight)
    if chosen is Backend.REFERENCE:
        reference.grouped_linear(x, weight, bias, plan, out)
    elif x.dtype is torch.float32 and not isinstance(weight, torch.Tensor):
        raise KernelArgumentError("x: must be bf16 or fp16 where a kernel multiplies with a stored weight")
    else:
        from kernels.grouped_linear.triton import launch

        launch(x, weight, bias, plan, out)


def _check_weight(weight: GroupedWeight, plan: ExpertPlan, device: torch.device) -> tuple[int, int]:
    """Returns the outputs and the depth of each expert."""
    check_tensor("plan.order", plan.order, (None,), (torch.int32,), device)
    if isinstance(weight, StoredExperts):
        check_stored(weight, plan.num_experts, device)
        return weight.shape[1:]
    if isinstance(weight, ExpertWords):
        check_words(weight, plan.num_experts, device)
        return weight.shape[1:]
    if isinstance(weight, tuple):
        if len(weight) != plan.num_experts:
            raise KernelArgumentError(f"weight: must be of {plan.num_experts} experts, got {len(weight)}")
        return weight[0].shape[0], weight[0].shape[1]
    check_tensor("weight", weight, (plan.num_experts, None, None), KV_DTYPES, device)
    check_rows("weight", weight)
    return weight.shape[1], weight.shape[2]
