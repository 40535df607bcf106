"""The kernels of DeepSeek V4, compiled for Hopper without a GPU: tensor cores where products are, hardly a spill."""

from __future__ import annotations

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_compiles import compile_for_hopper, own_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SHARED_BYTES = 200 << 10
# Of a thread, where more registers would mean fewer warps or smaller tiles.
SPILLED_BYTES = 512
INTEGERS = ("tables", "entry_tables", "sequences", "num_keys", "num_seen", "chosen")


def pointer(name: str) -> str:
    if name.startswith(INTEGERS):
        return "*i32"
    return "*fp32" if name.startswith("sinks") else "*bf16"


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize(("of_page", "k"), [(32, 512), (32, 1024), (1, 0), (0, 0)])
def test_compressed_attention(heads: int, of_page: int, k: int) -> None:
    from kernels.compressed_attention.triton import BLOCK_N, MOST_HEADS, STAGES, WARPS, attend_compressed

    rows = min(max(heads, 16), MOST_HEADS)
    constants = {
        "WINDOW": 128, "HAS_ENTRIES": of_page > 0, "K": k, "HEADS": heads, "D": 512, "PAGE": 128,
        "OF_PAGE": of_page or 128, "ROWS": rows, "BLOCK_N": BLOCK_N, "BLOCK_D": 512, "STAGES": STAGES,
    }  # fmt: skip
    built = compile_for_hopper(attend_compressed, constants, WARPS, pointer)
    assert ("wgmma.mma_async" if rows == MOST_HEADS else "mma.sync") in built.ptx and "cp.async" in built.ptx
    assert not built.serialised
    assert built.stack_bytes <= SPILLED_BYTES and built.shared_bytes <= SHARED_BYTES
