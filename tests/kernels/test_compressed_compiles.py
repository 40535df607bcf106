"""The kernels of DeepSeek V4, compiled for Hopper without a GPU: tensor cores where products are, hardly a spill."""

from __future__ import annotations

import pytest

from tests.examples import thorough
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import compile_gluon, descriptor
from tests.kernels.test_compiles import compile_for_hopper, own_cache

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SHARED_BYTES = 200 << 10
# Of a thread, where more registers would mean fewer warps or smaller tiles; Triton 3.6 needs 544, 3.7 fewer.
SPILLED_BYTES = 576
# The same, of what lives from one piece of a list to the next: the loop over its tiles spills nothing.
PIECE_SPILLED_BYTES = 224
MOST_SHARED_BYTES = 227 << 10
INTEGERS = ("arrivals", "tables", "entry_tables", "sequences", "num_keys", "chosen")
FLOATS = (
    "scores",
    "peaks",
    "decays",
    "sums",
    "tops",
    "acc",
    "row_max",
    "row_sum",
    "sinks",
    "bias",
    "cos_sin",
    "mixes",
    "base",
    "scale",
    "post",
    "comb",
)


def pointer(name: str) -> str:
    if name.startswith(("slots", "positions")):
        return "*i64"
    if name.startswith(INTEGERS):
        return "*i32"
    return "*fp32" if name.startswith(FLOATS) else "*bf16"


def ratio_of(of_page: int) -> int:
    """Tokens of an entry, 0 without entries."""
    return 128 // of_page if of_page else 0


# Tiles of 64 and of 128 heads have the same rows, and K bounds a loop: published models', and 8 heads of a device.
@pytest.mark.parametrize(
    ("heads", "of_page", "k", "splits"),
    [
        (128, 32, 1024, False), (8, 32, 512, True), (128, 1, 0, False), (8, 0, 0, False),
        thorough(128, 32, 1024, True), *(thorough(64, 32, 512, splits) for splits in (False, True)),
        thorough(8, 32, 512, False), thorough(128, 1, 0, True), thorough(8, 0, 0, True),
        *(thorough(8, 1, 0, splits) for splits in (False, True)),
        *(thorough(128, 0, 0, splits) for splits in (False, True)),
    ],
)  # fmt: skip
def test_compressed_attention(heads: int, of_page: int, k: int, splits: bool) -> None:
    from kernels.compressed_attention.triton import BLOCK_N, MOST_HEADS, PIECE, STAGES, WARPS, attend_compressed

    rows = min(max(heads, 16), MOST_HEADS)
    constants = {
        "SPLITS": splits, "WINDOW": 128, "RATIO": ratio_of(of_page), "K": k, "HEADS": heads, "D": 512, "PAGE": 128,
        "OF_PAGE": of_page or 128, "PIECE": PIECE, "ROWS": rows, "BLOCK_N": BLOCK_N, "BLOCK_D": 512, "STAGES": STAGES,
    }  # fmt: skip
    built = compile_for_hopper(attend_compressed, constants, WARPS, pointer)
    assert ("wgmma.mma_async" if rows == MOST_HEADS else "mma.sync") in built.ptx and "cp.async" in built.ptx
    assert not built.serialised
    assert built.stack_bytes <= SPILLED_BYTES and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    ("heads", "of_page", "k", "splits"),
    [
        (128, 32, 512, False), (128, 1, 0, True), (16, 0, 0, False), thorough(128, 1, 0, False),
        thorough(64, 32, 1024, False), thorough(65, 1, 0, True),
    ],
)  # fmt: skip
def test_compressed_attention_in_gluon(heads: int, of_page: int, k: int, splits: bool) -> None:
    from kernels.compressed_attention.hopper.kernel import attend_window_and_entries
    from kernels.compressed_attention.hopper.launch import PIECE, STAGES

    constants = {
        "SPLITS": splits, "PIECE": PIECE, "WINDOW": 128, "RATIO": ratio_of(of_page), "K": k, "HEADS": heads,
        "PAGE": 128, "OF_PAGE": of_page or 128, "STAGES": STAGES,
    }  # fmt: skip
    kinds = {name: pointer(name) for name in attend_window_and_entries.arg_names if name.endswith("_ptr")}
    kinds |= {"q_desc": descriptor("bf16", [64, 256]), "scale_log2": "fp32"}
    built = compile_gluon(attend_window_and_entries, constants, kinds)
    assert "wgmma.mma_async" in built.ptx and "cp.async" in built.ptx and not built.serialised
    assert built.stack_bytes <= PIECE_SPILLED_BYTES and built.shared_bytes <= MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("phase", "heads", "of_page", "k", "group"),
    [
        ("WEIGHTS", 128, 32, 1024, 16), ("VALUES", 128, 32, 1024, 16), ("WEIGHTS", 128, 32, 512, 8),
        ("VALUES", 128, 32, 512, 8), ("VALUES", 16, 1, 0, 16), ("FOLD", 128, 1, 0, 1),
        thorough("VALUES", 64, 32, 1024, 8), thorough("WEIGHTS", 16, 1, 0, 16), thorough("VALUES", 8, 0, 0, 8),
    ],
)  # fmt: skip
def test_compressed_attention_in_phases(phase: str, heads: int, of_page: int, k: int, group: int) -> None:
    from kernels.compressed_attention.hopper import phases
    from kernels.compressed_attention.hopper.launch import LONG_KEYS, MOST_SHORT, PIECE, SHORT_KEYS

    is_short, warps = k == 512, 1 if phase == "FOLD" else 4
    constants = {
        "PHASE": getattr(phases, phase).value, "PIECE": MOST_SHORT if is_short else PIECE, "WINDOW": 128,
        "RATIO": ratio_of(of_page), "K": k, "HEADS": heads, "PAGE": 128, "OF_PAGE": of_page or 128,
        "KEYS": SHORT_KEYS if is_short else LONG_KEYS, "GROUP": group, "ARRIVALS": max(heads // group * 8, 32),
        "WARPS": warps,
    }  # fmt: skip
    kinds = {name: pointer(name) for name in phases.attend_in_phases.arg_names if name.endswith("_ptr")}
    built = compile_gluon(phases.attend_in_phases, constants, {**kinds, "scale_log2": "fp32"}, num_warps=warps)
    has_products = phase in ("WEIGHTS", "VALUES")
    assert has_products == ("wgmma.mma_async" in built.ptx and "cp.async" in built.ptx) and not built.serialised
    assert not built.spills and built.shared_bytes <= MOST_SHARED_BYTES
    if phase == "VALUES":
        # Keys are on their way before the launches before have ended, and nothing is written.
        before = built.ptx.partition("griddepcontrol.wait")[0]
        assert "cp.async.cg" in before and "st.global" not in before


def test_the_fold_of_pieces() -> None:
    from kernels.compressed_attention.merge_triton import fold_pieces
    from kernels.compressed_attention.triton import PIECE

    constants = {
        "WINDOW": 128, "RATIO": 4, "K": 512, "HEADS": 128, "D": 512, "PIECE": PIECE, "ROWS": 64,
        "BLOCK_D": 512,
    }  # fmt: skip
    assert not compile_for_hopper(fold_pieces, constants, 1, pointer).spills


@pytest.mark.parametrize(("ratio", "overlap", "dim"), [(4, True, 512), (4, True, 128), (128, False, 512)])
def test_compress_tokens(ratio: int, overlap: bool, dim: int) -> None:
    from kernels.compress_tokens.triton import compress_rows, tile_of

    tile = tile_of(ratio, overlap, dim)
    constants = {
        "RATIO": ratio, "OVERLAP": overlap, "D": dim, "HALF": 32, "PAGE": 128, "OF_PAGE": 128 // ratio,
        "CHUNK": tile.chunk, "BLOCK_D": dim,
    }  # fmt: skip
    assert not compile_for_hopper(compress_rows, constants, tile.warps, pointer).spills


@pytest.mark.parametrize("heads", [thorough(64), 128])
def test_tails(heads: int) -> None:
    from kernels.rotate_append_tail.triton import BLOCK_H, rotate_tails
    from kernels.rotate_tail.triton import rotate_heads

    sizes = {"HEADS": heads, "DIM": 512, "HALF": 32, "BLOCK_H": BLOCK_H, "BLOCK_HALF": 32}
    append = {**sizes, "PAGE": 128, "BLOCK_DIM": 512}
    assert not compile_for_hopper(rotate_tails, append, 1, pointer, enable_fp_fusion=False).spills
    for inverse in (False, True):
        turn = {**sizes, "INVERSE": inverse}
        assert not compile_for_hopper(rotate_heads, turn, 1, pointer, enable_fp_fusion=False).spills


@pytest.mark.parametrize("hidden", [thorough(4096), 7168])
def test_mix_streams(hidden: int) -> None:
    from kernels.mix_streams.triton import BLOCK_D, WARPS, spread_output, weigh_streams

    sizes = {"D": hidden, "N": 4, "BLOCK_N": 4, "BLOCK_D": BLOCK_D}
    assert not compile_for_hopper(spread_output, sizes, WARPS, pointer).spills
    for collapses in (False, True):
        assert not compile_for_hopper(weigh_streams, {**sizes, "COLLAPSES": collapses}, WARPS, pointer).spills


@pytest.mark.parametrize("hidden", [4096, 7168])
def test_the_norm_of_all_streams_of_a_token(hidden: int) -> None:
    from kernels.rms_norm.triton import MAX_WARPS, normalise_rows

    def of(name: str) -> str:
        return "*fp32" if name.startswith(("out", "weight")) else "*bf16"

    block = triton.next_power_of_2(4 * hidden)
    built = compile_for_hopper(
        normalise_rows, {"D": 4 * hidden, "BLOCK_D": block, "ADDS": False, "OVERLAPS": True}, MAX_WARPS, of
    )
    assert not built.spills
