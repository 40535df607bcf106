"""What is measured of the ops of expert layers, with the shapes of published models.

Few tokens: GB/s of what is read and written, each expert's weights once if any token chose it. Many: TFLOP/s. Each
product is measured with tiles of every size, since `plan_experts` chooses one by the number of pairs; with stored
weights, whose bytes count as they are stored, with that one.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from benchmarks.measurement import (
    FP32,
    GEMM,
    OUT_TOLERANCE,
    READ,
    Maker,
    Measurement,
    Peer,
    random,
    row_error,
    unequal,
)
from kernels.backend import Backend
from kernels.combine_experts import combine_experts
from kernels.gated_activation import silu_mul
from kernels.grouped_linear import (
    TILE_ROWS,
    ExpertPlan,
    Fp8Experts,
    Mxfp4Experts,
    StoredExperts,
    dequantised,
    grouped_linear,
    packed_experts,
    plan_experts,
)
from kernels.linear import Route, linear
from kernels.route_experts import RoutingRule, Scoring, route_experts

EXPERTS = 128
ROUTED_TOKENS = (1, 64, 8192)
TOP_8 = RoutingRule(8, renormalise=True)
GROUPED = RoutingRule(8, Scoring.SIGMOID, True, 2.5, num_groups=8, top_groups=4, group_best=2)
MANY_TOKENS = 1024
WEIGHT_ERROR = 1e-5


class ExpertShape(NamedTuple):
    """An expert layer: hidden size, inner size, experts, and how many of them a token chooses."""

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int


QWEN = ExpertShape("Qwen3-30B-A3B", 2048, 768, 128, 8)
GPT_OSS = ExpertShape("gpt-oss-20b", 2880, 2880, 32, 4)
DEEPSEEK = ExpertShape("DeepSeek-V3", 7168, 2048, 256, 8)
DEEPSEEK_4 = ExpertShape("DeepSeek-V4-Flash", 4096, 2048, 256, 6)
LAYER_TOKENS = {QWEN: (1, 16, 64, 256, 2048, 8192), GPT_OSS: (1, 16, 64, 256, 2048, 8192), DEEPSEEK: (1, 64, 2048)}
# Weights of fp8 with factors of bf16 take one product each, with factors of fp32 two.
FP8, FP8_OF_BF16, MXFP4 = "fp8", "fp8, factors of bf16", "mxfp4"
STORED = (
    *((shape, kind) for shape in (QWEN, DEEPSEEK) for kind in (FP8, FP8_OF_BF16)),
    *((shape, MXFP4) for shape in (GPT_OSS, DEEPSEEK_4)),
)
STORED_TOKENS = (16, 64, 512, 2048, 8192)
ROUTER_TOKENS = (16, 64, 512, 2048)
ROUTER_DEPTH, ROUTER_EXPERTS = DEEPSEEK.hidden, DEEPSEEK.experts
ROUTER_ERROR = 1e-5


def drawn_ids(tokens: int, shape: ExpertShape) -> torch.Tensor:
    """Every token's experts, all choices equally likely."""
    logits = torch.randn(tokens, shape.experts, device="cuda")
    return route_experts(logits, RoutingRule(shape.top_k)).expert_ids


def route(tokens: int, rule: RoutingRule) -> list[Measurement]:
    """Bytes of logits read and of ids and weights written; the peer chooses by torch's softmax and top-k."""
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    bias = torch.randn(EXPERTS, device="cuda") / 10 if rule.adds_scores else None
    call = partial(route_experts, logits, rule, bias)

    def error() -> float:
        """Infinite where more than a row in a thousand chose others: a sum's last bit may decide between two groups."""
        got, wanted = call(), call(backend=Backend.REFERENCE)
        same = (got.expert_ids == wanted.expert_ids).all(dim=1)
        if int((~same).sum()) > tokens // 1000:
            return float("inf")
        return float(((got.weights - wanted.weights).abs().amax(dim=1) * same).max())

    def peer() -> torch.Tensor:
        weights, _ = logits.softmax(dim=-1).topk(rule.top_k)
        return weights / weights.sum(dim=-1, keepdim=True)

    amount = 4e-9 * tokens * (EXPERTS + 2 * rule.top_k)
    name = f"{tokens} x {EXPERTS}, top {rule.top_k}{f' in {rule.num_groups} groups' if rule.adds_scores else ''}"
    peers = () if rule.adds_scores else (Peer("torch", peer, amount),)
    return [Measurement("route_experts", name, amount, call, error, WEIGHT_ERROR, peers)]


def router(tokens: int) -> list[Measurement]:
    """A router's fp32 product of fixed slices; the peer is torch's, with the process's settings."""
    x = torch.randn(tokens, ROUTER_DEPTH, device="cuda")
    weight = torch.randn(ROUTER_EXPERTS, ROUTER_DEPTH, device="cuda")
    call = partial(linear, x, weight, route=Route.TILED)
    amount = 2e-12 * tokens * weight.numel()
    peers = (Peer("torch", partial(functional.linear, x, weight), amount),)

    def error() -> float:
        return row_error(call(), linear(x, weight, backend=Backend.REFERENCE))

    case = f"{tokens} x {ROUTER_DEPTH} to {ROUTER_EXPERTS}, fp32"
    return [Measurement("linear", case, amount, call, error, ROUTER_ERROR, peers, FP32)]


def plan(tokens: int, shape: ExpertShape) -> list[Measurement]:
    """Bytes of ids read and of pairs written, each once: a plan is bound by the latency of one launch."""
    ids = drawn_ids(tokens, shape)
    call = partial(plan_experts, ids, shape.experts)

    def error() -> float:
        got, wanted = call(), call(backend=Backend.REFERENCE)
        count = int(wanted.num_tiles)
        pairs = ((got.order, wanted.order), (got.starts, wanted.starts), (got.tiles[:count], wanted.tiles[:count]))
        return max(unequal(*pair) for pair in (*pairs, (got.num_tiles, wanted.num_tiles)))

    peer = Peer("torch.sort", partial(torch.sort, ids.flatten(), stable=True), amount := 8e-9 * ids.numel())
    return [Measurement("plan_experts", f"{tokens} tokens, {shape.name}", amount, call, error, peers=(peer,))]


def product(tokens: int, shape: ExpertShape) -> list[Measurement]:
    """The first product of a layer, gate and up in one."""
    ids, x = drawn_ids(tokens, shape), random(tokens, shape.hidden)
    weight = random(shape.experts, 2 * shape.inner, shape.hidden)
    used, pairs = int(ids.unique().numel()), ids.numel()
    moved = used * weight[0].numel() + x.numel() + pairs * 2 * shape.inner
    is_large = tokens >= MANY_TOKENS
    amount = 2e-12 * pairs * weight[0].numel() if is_large else 2e-9 * moved

    def measured(rows: int) -> Measurement:
        given = plan_experts(ids, shape.experts, tile_rows=rows)
        call = partial(grouped_linear, x, weight, given)

        def error() -> float:
            return row_error(call(), by_expert(x, weight, given))

        peers, case = (library_product(x, weight, given, amount),), f"{tokens} tokens, {shape.name}, tiles of {rows}"
        return Measurement(
            "grouped_linear", case, amount, call, error, OUT_TOLERANCE, peers, GEMM if is_large else READ
        )

    return [measured(rows) for rows in TILE_ROWS]


def stored_product(tokens: int, shape: ExpertShape, kind: str) -> list[Measurement]:
    """The same with weights as they are stored, bit for bit; the peer has them in bf16."""
    ids, x = drawn_ids(tokens, shape), random(tokens, shape.hidden)
    weight = stored_experts(kind, shape.experts, 2 * shape.inner, shape.hidden)
    whole, given = dequantised(weight, x.dtype), plan_experts(ids, shape.experts)
    used, pairs = int(ids.unique().numel()), ids.numel()
    moved = used * sum(part[0].nbytes for part in weight) + 2 * (x.numel() + pairs * 2 * shape.inner)
    is_large = tokens >= MANY_TOKENS
    amount = 2e-12 * pairs * whole[0].numel() if is_large else 1e-9 * moved
    kept = packed_experts(weight)
    call, peer = partial(grouped_linear, x, kept, given), partial(grouped_linear, x, whole, given)

    def error() -> float:
        return unequal(call(), peer())

    case, ceiling = f"{tokens} tokens, {shape.name}, {kind}", GEMM if is_large else READ
    peers = (Peer("bf16", peer, amount),)
    return [Measurement("grouped_linear", case, amount, call, error, peers=peers, ceiling=ceiling)]


def stored_experts(kind: str, experts: int, outputs: int, depth: int) -> StoredExperts:
    if kind == MXFP4:
        return mxfp4_experts(experts, outputs, depth)
    weight = fp8_experts(experts, outputs, depth)
    return weight if kind == FP8 else weight._replace(scales=weight.scales.bfloat16().float())


def fp8_experts(experts: int, outputs: int, depth: int) -> Fp8Experts:
    codes = torch.randint(0, 255, (experts, outputs, depth), dtype=torch.uint8, device="cuda")
    codes -= (codes == 127).to(torch.uint8)  # 127 is not a number, nor is 255
    scales = torch.rand(experts, -(-outputs // 128), -(-depth // 128), device="cuda") / 1000
    return Fp8Experts(codes.view(torch.float8_e4m3fn), scales)


def mxfp4_experts(experts: int, outputs: int, depth: int) -> StoredExperts:
    values = torch.randint(0, 256, (experts, outputs, depth // 2), dtype=torch.uint8, device="cuda")
    exponents = torch.randint(112, 124, (experts, outputs, depth // 32), dtype=torch.uint8, device="cuda")
    return Mxfp4Experts(values, exponents)


def by_expert(x: torch.Tensor, weight: torch.Tensor, given: ExpertPlan) -> torch.Tensor:
    """Each expert's rows in one product of torch's."""
    out, order = x.new_empty(given.num_pairs, weight.shape[1]), given.order.long()
    for expert, (begin, end) in enumerate(pairwise(given.starts.tolist())):
        pairs = order[begin:end]
        out[pairs] = x[pairs // given.top_k] @ weight[expert].T
    return out


def library_product(x: torch.Tensor, weight: torch.Tensor, given: ExpertPlan, amount: float) -> Peer:
    """torch's grouped_mm over rows that lie in order already; its name tells how many rows change with the batch."""
    rows, ends = x[given.order.long() // given.top_k], given.starts[1:]
    call = partial(functional.grouped_mm, rows, weight.transpose(1, 2), offs=ends)
    try:
        changed = rows_changed(rows, weight, given, call())
    except RuntimeError:
        return Peer("grouped_mm", call, amount)
    return Peer(f"grouped_mm ({changed} of {given.num_pairs} rows change with the batch)", call, amount)


def rows_changed(rows: torch.Tensor, weight: torch.Tensor, given: ExpertPlan, together: torch.Tensor) -> int:
    """Returns how many rows have other bits when half of each expert's rows are left out."""
    bounds = list(pairwise(given.starts.tolist()))
    kept = torch.cat([torch.arange(begin, end - (end - begin) // 2) for begin, end in bounds]).to(rows.device)
    counts = torch.tensor([end - begin - (end - begin) // 2 for begin, end in bounds])
    ends = counts.cumsum(0).int().to(rows.device)
    fewer = functional.grouped_mm(rows[kept], weight.transpose(1, 2), offs=ends)
    return int((fewer != together[kept]).any(dim=1).sum())


def combine(tokens: int, shape: ExpertShape) -> list[Measurement]:
    rows, weights = random(tokens * shape.top_k, shape.hidden), torch.rand(tokens, shape.top_k, device="cuda")
    call = partial(combine_experts, rows, weights)
    amount = 2e-9 * (rows.numel() + tokens * shape.hidden)

    def error() -> float:
        return unequal(call(), call(backend=Backend.REFERENCE))

    def peer() -> torch.Tensor:
        return (rows.view(tokens, shape.top_k, -1) * weights[:, :, None]).sum(dim=1).to(rows.dtype)

    name = f"{tokens} tokens, {shape.name}"
    peers = (Peer("torch", peer, amount),)
    return [Measurement("combine_experts", name, amount, call, error, peers=peers)]


def layer(tokens: int, shape: ExpertShape) -> list[Measurement]:
    """All launches of an expert layer but the router's GEMM; figures count the products."""
    x, logits = random(tokens, shape.hidden), torch.randn(tokens, shape.experts, device="cuda")
    gate_up = random(shape.experts, 2 * shape.inner, shape.hidden) / shape.hidden**0.5
    down = random(shape.experts, shape.hidden, shape.inner) / shape.inner**0.5
    rule = RoutingRule(shape.top_k, renormalise=True)

    def call() -> torch.Tensor:
        routing = route_experts(logits, rule)
        given = plan_experts(routing.expert_ids, shape.experts)
        inner = silu_mul(grouped_linear(x, gate_up, given))
        return combine_experts(grouped_linear(inner, down, given), routing.weights)

    def wanted() -> torch.Tensor:
        routing = route_experts(logits, rule, backend=Backend.REFERENCE)
        given = plan_experts(routing.expert_ids, shape.experts, backend=Backend.REFERENCE)
        inner = silu_mul(by_expert(x, gate_up, given))
        rows = by_expert(inner, down, given._replace(top_k=1))
        return combine_experts(rows, routing.weights, backend=Backend.REFERENCE)

    used, each = int(route_experts(logits, rule).expert_ids.unique().numel()), 3 * shape.hidden * shape.inner
    is_large = tokens >= MANY_TOKENS
    amount = 2e-12 * tokens * shape.top_k * each if is_large else 2e-9 * used * each
    case, ceiling = f"{tokens} tokens, {shape.name}", GEMM if is_large else READ
    return [
        Measurement("expert layer", case, amount, call, lambda: row_error(call(), wanted()), OUT_TOLERANCE, (), ceiling)
    ]


CASES = [(tokens, shape) for shape, counts in LAYER_TOKENS.items() for tokens in counts]
AREAS: dict[str, tuple[Maker, ...]] = {
    "routing": (
        *(partial(route, tokens, rule) for tokens in ROUTED_TOKENS for rule in (TOP_8, GROUPED)),
        *(partial(router, tokens) for tokens in ROUTER_TOKENS),
    ),
    "experts": tuple(partial(make, *case) for make in (plan, product, combine, layer) for case in CASES),
    "stored": tuple(partial(stored_product, tokens, *case) for case in STORED for tokens in STORED_TOKENS),
}
