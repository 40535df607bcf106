"""The kernels of expert layers, compiled for Hopper without a GPU: no spill, no wait after every product."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.route_experts import RoutingRule, Scoring
from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_compiles import compile_for_hopper, own_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SIXTEEN_BITS = ("bf16", "fp16")


def kinds(values: str, **others: str) -> Callable[[str], str]:
    """The types of pointers: `others` by their beginnings, the rest to `values`."""
    return lambda name: next((kind for start, kind in others.items() if name.startswith(start)), f"*{values}")


@pytest.mark.parametrize(
    ("experts", "rule", "has_bias"),
    [
        (512, RoutingRule(10, renormalise=True), False),
        (160, RoutingRule(6, scale=16.0, num_groups=8, top_groups=3), False),
        (256, RoutingRule(8, Scoring.SIGMOID, True, 2.5, num_groups=8, top_groups=4, group_best=2), True),
    ],
    ids=["512 experts", "DeepSeek V2", "DeepSeek V3"],
)
def test_routing(experts: int, rule: RoutingRule, has_bias: bool) -> None:
    from kernels.route_experts.triton import constants, route_rows

    pointer = kinds("fp32", ids_ptr="*i32")
    built = compile_for_hopper(route_rows, constants(rule, experts, has_bias), 1, pointer)
    assert not built.spills
