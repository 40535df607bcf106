"""The kernels of sparse attention, compiled for Hopper without a GPU: tensor cores where products are, no spill."""

from __future__ import annotations

import re

import pytest

from tests.examples import thorough
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import Assembled, compile_gluon, descriptor, flat_descriptor
from tests.kernels.test_compiles import compile_for_hopper, own_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SHARED_BYTES = 227 << 10
# Of a thread, where more registers would mean fewer warps or smaller tiles: measured slower on an H200.
SPILLED_BYTES = 512
# The same, of what lives from one piece of a query to the next: the loop over its tiles spills nothing.
PIECE_SPILLED_BYTES = 64
# Of the producer of wide blocks, whose pages of 8 tokens are 64 boxes.
ADDRESS_BYTES = 96
# Of top_k's Gluon kernels: what a row needs whose bound was a bad guess.
CHOICE_SPILLED_BYTES = 640
INTEGERS = ("tables", "sequences", "num_keys", "chosen", "positions")
FLOATS = ("weights", "scales", "cos_sin", "acc", "row_max", "row_sum")


def pointer(name: str) -> str:
    if name.startswith("slots"):
        return "*i64"
    if name.startswith(INTEGERS):
        return "*i32"
    return "*fp32" if name.startswith(FLOATS) else "*bf16"


def fp8_pointer(name: str) -> str:
    return "*fp8e4nv" if name.startswith(("pages", "q_ptr")) else pointer(name)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [thorough(32), 64])
@pytest.mark.parametrize("is_large", [False, True])
def test_index_logits(is_large: bool, heads: int, fp8: bool) -> None:
    from kernels.index_logits.triton import BLOCK_N, SPAN, SPAN_STAGES, STAGES, TILE_ROWS, WARPS, score_keys, score_span

    shared = {
        "HEADS": heads, "DIM": 128, "PAGE": 16, "BLOCK_N": BLOCK_N, "BLOCK_H": heads, "BLOCK_D": 128, "HAS_SCALES": fp8,
    }  # fmt: skip

    def of(name: str) -> str:
        return "*fp32" if name.startswith("out") else (fp8_pointer if fp8 else pointer)(name)

    if is_large:
        built = compile_for_hopper(score_keys, {**shared, "ROWS": TILE_ROWS, "STAGES": STAGES}, WARPS, of)
    else:
        built = compile_for_hopper(score_span, {**shared, "SPAN": SPAN, "STAGES": SPAN_STAGES}, WARPS, of)
    assert "wgmma.mma_async" in built.ptx and "cp.async" in built.ptx and not built.serialised
    assert not built.spills and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("width", [65_536, thorough(1 << 20)])
@pytest.mark.parametrize("has_many_rows", [thorough(False), True])
def test_top_k(has_many_rows: bool, width: int) -> None:
    from kernels.top_k import triton as top_k

    def of(name: str) -> str:
        return "*fp32" if name.startswith("logits") else "*i32"

    k, held = 2048, top_k.held_of(2048)
    warps = top_k.MANY_ROWS_WARPS if has_many_rows else top_k.FEW_ROWS_WARPS
    sample = {"SAFETY": top_k.SAFETY, "K": k, "LEAST": held // 2, "SAMPLE": top_k.SAMPLE}
    chosen = {"K": k, "BLOCK_K": k, "CHUNK": top_k.CHUNK, "CHUNKS": width // top_k.CHUNK, "HELD": held}
    built = [
        compile_for_hopper(top_k.sample_rows, sample, warps[0], of),
        compile_for_hopper(top_k.filter_chunks, {"K": k, "CHUNK": top_k.CHUNK}, warps[1], of),
        compile_for_hopper(top_k.choose_filtered, chosen, warps[2], of),
        compile_for_hopper(top_k.choose_row, {"K": k, "BLOCK_K": k, "HELD": top_k.HELD}, top_k.WARPS, of),
    ]
    for kernel in built:
        assert kernel.stack_bytes <= SPILLED_BYTES and not re.search(r"\b(atom|red)\.", kernel.ptx)


def test_top_k_in_gluon() -> None:
    from kernels.top_k.hopper import held_of, kernel, launch
    from kernels.top_k.triton import SAFETY, SAMPLE

    narrow, wide = launch.NARROW_ROWS, launch.WIDE_ROWS
    chosen = {"K": 2048, "BLOCK_K": 2048, "HELD": held_of(2048)}
    kept = {"K": 2048, "HELD": held_of(2048), "SAFETY": SAFETY, "SAMPLE": SAMPLE}
    cases = (
        (kernel.choose_rows, {**chosen, **kept}, narrow.tile, {"maxnreg": narrow.registers}),
        (kernel.choose_rows, {**chosen, **kept}, wide.tile, {"maxnreg": wide.registers}),
        (kernel.keep_spans, kept, launch.SPAN_TILE, {}),
        (kernel.choose_kept, {**chosen, "SPANS": launch.LEAST_SPANS}, launch.CHOICE_TILE, {}),
    )
    for function, constants, tile, options in cases:
        kinds = {"logits_ptr": "*fp32", "kept_ptr": "*i64"}
        kinds |= {name: "*i32" for name in function.arg_names if name.endswith("_ptr") and name not in kinds}
        constants = {**constants, "SLOTS": tile.slots, "WARPS": tile.warps}
        built = compile_gluon(function, constants, kinds, num_warps=tile.warps, **options)
        assert built.stack_bytes <= CHOICE_SPILLED_BYTES and not re.search(r"\b(atom|red)\.", built.ptx)
        assert "vote.sync.ballot" in built.ptx and "redux.sync" in built.ptx


def assert_fast(built: Assembled) -> None:
    """On tensor cores, in the background, with every number in a register."""
    assert "wgmma.mma_async" in built.ptx and not built.serialised
    assert not built.spills and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    ("heads", "page_tokens"),
    [
        (32, 8), *(thorough(64, tokens) for tokens in (8, 16, 64, 256)),
        *(thorough(32, tokens) for tokens in (16, 64, 256)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_index_logits_in_gluon(is_tiled: bool, fp8: bool, heads: int, page_tokens: int) -> None:
    from kernels.index_logits.hopper import launch
    from kernels.index_logits.hopper.spans import score_spans
    from kernels.index_logits.hopper.tiles import score_tiles

    dtype, bits, page_tokens = ("fp8e4nv", 8, max(page_tokens, 16)) if fp8 else ("bf16", 16, page_tokens)
    constants = {"HEADS": heads, "DIM": 128, "PAGE": page_tokens, "HAS_SCALES": fp8}
    if is_tiled:
        tile = launch.TILES[bits // 8]
        function, keys = score_tiles, tile.keys
        constants |= {name.upper(): value for name, value in tile._asdict().items()}
        constants |= {"ROWS": launch.tile_rows(2048, 2048)}
    else:
        function, keys = score_spans, launch.SPAN_KEYS
        constants |= {"SPAN": launch.MOST_SPAN, "STAGES": launch.SPAN_STAGES[bits // 8]}
    kinds = {name: pointer(name) for name in function.arg_names if name.endswith("_ptr")} | {"out_ptr": "*fp32"}
    kinds |= {"q_desc": descriptor(dtype, [1, heads, 128], bits)}
    kinds |= {"k_desc": descriptor(dtype, [min(page_tokens, keys), 128], bits)}
    kinds |= {"weights_desc": flat_descriptor("fp32", heads)} if is_tiled else {}
    built = compile_gluon(function, {**constants, "KEYS": keys}, kinds)
    assert_fast(built)
    assert ("f32.e4m3.e4m3" in built.ptx) == fp8


@pytest.mark.parametrize("fp8", [False, True])
def test_index_logits_in_blocks(fp8: bool) -> None:
    from kernels.index_logits.hopper import launch
    from kernels.index_logits.hopper.blocks import score_blocks

    heads, page_tokens = launch.BLOCK_CASE
    dtype, size = ("fp8e4nv", 1) if fp8 else ("bf16", 2)
    constants = {
        "HEADS": heads, "DIM": 128, "PAGE": page_tokens, "KEYS": launch.BLOCK_KEYS[size], "HAS_SCALES": fp8,
    }  # fmt: skip
    kinds = {name: pointer(name) for name in score_blocks.arg_names if name.endswith("_ptr")}
    kinds |= {"q_ptr": f"*{dtype}", "pages_ptr": f"*{dtype}", "out_ptr": "*fp32"}
    built = compile_gluon(score_blocks, constants, kinds, aligned=("stride_q", "stride_weights", "page_rows"))
    assert_fast(built)
    assert ("f32.e4m3.e4m3" in built.ptx) == fp8 and "cp.async.cg" in built.ptx


@pytest.mark.parametrize(
    ("page_tokens", "heads"),
    [
        (64, 128),
        (1, 8),
        *(thorough(64, heads) for heads in (8, 16, 64)),
        *(thorough(1, heads) for heads in (16, 64, 128)),
    ],
)
def test_sparse_latent_attention(heads: int, page_tokens: int) -> None:
    from kernels.sparse_latent_attention.triton import BLOCK_N, MOST_HEADS, STAGES, attend_chosen

    constants = {
        "K": 2048, "HEADS": heads, "PAGE": page_tokens, "ROWS": min(max(heads, 16), MOST_HEADS), "BLOCK_N": BLOCK_N,
        "LATENT": 512, "ROPE": 64, "BLOCK_LATENT": 512, "BLOCK_ROPE": 64, "STAGES": STAGES,
    }  # fmt: skip
    built = compile_for_hopper(attend_chosen, constants, 8, pointer)
    assert "mma" in built.ptx and not built.serialised
    assert built.stack_bytes <= SPILLED_BYTES and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    ("heads", "page_tokens", "k", "splits"),
    [
        (128, 64, 2048, False), (128, 64, 2048, True), thorough(64, 16, 500, True), thorough(64, 16, 500, False),
        thorough(16, 1, 2048, False), thorough(16, 1, 2048, True),
    ],
)  # fmt: skip
def test_sparse_latent_attention_in_gluon(heads: int, page_tokens: int, k: int, splits: bool) -> None:
    from kernels.sparse_latent_attention.hopper.kernel import attend_gathered
    from kernels.sparse_latent_attention.hopper.launch import PIECE, STAGES

    constants = {
        "SPLITS": splits, "PIECES": -(-k // PIECE), "PIECE": PIECE, "K": k, "HEADS": heads, "PAGE": page_tokens,
        "STAGES": STAGES,
    }  # fmt: skip
    kinds = {name: pointer(name) for name in attend_gathered.arg_names if name.endswith("_ptr")}
    kinds |= {"q_half_desc": descriptor("bf16", [64, 256]), "q_rope_desc": descriptor("bf16", [64, 64])}
    built = compile_gluon(attend_gathered, constants, {**kinds, "scale_log2": "fp32"})
    assert "wgmma.mma_async" in built.ptx and "cp.async" in built.ptx and not built.serialised
    assert built.stack_bytes <= PIECE_SPILLED_BYTES and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(("heads", "page_tokens"), [(32, 8), *(thorough(64, tokens) for tokens in (16, 64, 256))])
def test_wide_logits_in_gluon(heads: int, page_tokens: int) -> None:
    """The loop over rows spills nothing."""
    from kernels.index_logits.hopper.launch import WIDE_KEYS, WIDE_ROWS
    from kernels.index_logits.hopper.wide import score_wide

    constants = {"HEADS": heads, "DIM": 128, "PAGE": page_tokens, "ROWS": WIDE_ROWS, "BLOCK": WIDE_KEYS}
    kinds = {name: pointer(name) for name in score_wide.arg_names if name.endswith("_ptr")} | {"out_ptr": "*fp32"}
    kinds |= {"q_desc": descriptor("bf16", [2, heads, 128]), "weights_desc": flat_descriptor("fp32", heads)}
    built = compile_gluon(score_wide, constants, kinds | {"k_desc": descriptor("bf16", [min(page_tokens, 64), 128])})
    assert "wgmma.mma_async" in built.ptx and not built.serialised and built.shared_bytes <= SHARED_BYTES
    assert built.stack_bytes <= ADDRESS_BYTES


@pytest.mark.parametrize("fp8", [False, True])
def test_rotate_append_index(fp8: bool) -> None:
    from kernels.rotate_append_index.triton import BLOCK_H, FP8_BLOCK_H, rotate_index

    constants = {
        "HEADS": 64, "DIM": 128, "HALF": 32, "PAGE": 16, "BLOCK_H": FP8_BLOCK_H if fp8 else BLOCK_H, "BLOCK_DIM": 128,
        "BLOCK_HALF": 32, "BLOCK_REST": 64, "HAS_SCALES": fp8,
    }  # fmt: skip
    built = compile_for_hopper(rotate_index, constants, 1, fp8_pointer if fp8 else pointer, enable_fp_fusion=False)
    assert not built.spills
