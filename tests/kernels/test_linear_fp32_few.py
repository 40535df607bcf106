"""linear's Gluon kernel in fp32 for few rows: the bits of the Triton kernels, and launches that overlap."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernels.graph_capture import graph_capture
from kernels.linear import Route, linear
from kernels.linear.fp32 import hopper
from kernels.rms_norm import rms_norm
from tests.examples import thorough
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_linear import GPU, assert_near, exact, made

HALF, FULL = torch.bfloat16, torch.float32
# Of a multiprocessor's shared memory: two programs have room beside each other, and one beside most others.
MOST_SHARED_BYTES = 64 << 10
# Slices of 256 columns and parts of them, blocks of 32 and parts of them, rows of 16 bytes and others.
SHAPES = ((256, 2304), (256, 7168), (70, 300), (7, 512), (33, 1025), (1, 258), (384, 608))


def test_who_takes_few_rows() -> None:
    assert hopper.MOST_ROWS == 32
    assert [hopper.tile_for(rows).rows for rows in (1, 8, 9, 16, 17, 32)] == [8, 8, 16, 16, 32, 32]
    assert not hopper.takes(made(4, 64))


def test_threads_cover_a_tile() -> None:
    """Sixteen lanes along the outputs, two along the rows: two neighbours share what they read of either."""
    for tile in hopper.TILES:
        assert tile.block_n == 16 * tile.patch_n and tile.rows == 2 * tile.patch_m * tile.num_warps


class TestCompiled:
    pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    @pytest.mark.parametrize("dtype", ["bf16", thorough("fp32")])
    @pytest.mark.parametrize("tile", hopper.TILES, ids=lambda tile: tile.rows)
    def test_weights_come_before_the_wait_and_sums_are_chains(self, tile: hopper.Tile, dtype: str) -> None:
        from kernels.linear.fp32.hopper.kernel import multiply_few_slices
        from kernels.linear.fp32.triton import BLOCK_K, SLICE_K
        from tests.kernels.gluon_compile import compile_gluon

        sizes = {"ROWS": tile.rows, "BLOCK_N": tile.block_n, "PATCH_N": tile.patch_n, "PATCH_M": tile.patch_m}
        built = compile_gluon(
            multiply_few_slices,
            {**sizes, "BLOCK_K": BLOCK_K, "SLICE_K": SLICE_K},
            {"x_ptr": f"*{dtype}", "weight_ptr": "*fp32", "partials_ptr": "*fp32"},
            num_warps=tile.num_warps,
            aligned=("stride", "depth", "width"),
            launch_pdl=True,
        )
        assert not built.spills and not built.stack_bytes
        assert built.shared_bytes == 4 * SLICE_K * (tile.rows + tile.block_n) <= MOST_SHARED_BYTES
        before, waits, after = built.ptx.partition("griddepcontrol.wait")
        assert waits and "griddepcontrol.launch_dependents" in before
        assert not re.search(r"ld\.global|st\.|bar\.sync", before) and "cp.async.cg.shared.global [" not in after
        assert before.count("cp.async.cg.shared.global [") == tile.block_n * SLICE_K // 4 // (32 * tile.num_warps)
        assert after.count("bar.sync") == 1
        assert not re.search(r"\bmul(\.\w+)*\.f32|\badd(\.\w+)*\.f32|\bfma(?!\.rn\.f32)|mma", built.ptx)
        chains = chains_of(built.ptx)
        assert [len(chain) for chain in chains] == [BLOCK_K] * (tile.patch_n * tile.patch_m)
        for chain in chains:
            assert_ascending(chain, built.ptx)


Factors = tuple[str, str]


def chains_of(ptx: str) -> list[list[Factors]]:
    """Returns the factors of the multiply-adds that continue one another, chain by chain."""
    chains: dict[str, list[Factors]] = {}
    for result, *factors, addend in re.findall(r"fma\.rn\.f32\s+(%\w+), (%\w+), (%\w+), (%\w+);", ptx):
        chains[result] = [*chains.pop(addend, []), (factors[0], factors[1])]
    return list(chains.values())


def assert_ascending(chain: list[Factors], ptx: str) -> None:
    """Four factors after another are one load's, in its order, of weights as of rows."""
    loaded = re.findall(r"ld\.shared\.v4\.\w+\s+\{(%\w+), (%\w+), (%\w+), (%\w+)\}", ptx)
    places = {register: (load, place) for load, four in enumerate(loaded) for place, register in enumerate(four)}
    for side in (0, 1):
        order = [places[factors[side]] for factors in chain]
        assert [place for _, place in order] == list(range(4)) * (len(chain) // 4)
        assert all(a[0] == b[0] for a, b in pairwise(order) if b[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def on_hopper(self) -> None:
        if not hopper.takes(made(1, 1, device=GPU)):
            pytest.skip("needs a Hopper GPU")

    @pytest.mark.parametrize("dtype", [HALF, torch.float16, FULL], ids=str)
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_a_row_has_the_bits_of_the_triton_kernels(
        self, outputs: int, depth: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows that lie dense, as parts of wider rows and at odd places, beside rows that are no numbers."""
        weight, bias = (made(*size, dtype=FULL, device=GPU, seed=1) for size in ((outputs, depth), (outputs,)))
        wide = made(33, 2 * depth + 1, dtype=dtype, device=GPU)
        for x in (wide[:, :depth].contiguous(), wide[:, depth : 2 * depth], wide[:, 1 : depth + 1]):
            for given in (None, bias):
                whole = linear(x, weight, given, route=Route.TILED)
                assert_near(whole, exact(x, weight, given))
                for rows in range(1, hopper.MOST_ROWS + 1):
                    few = linear(x[:rows], weight, given, route=Route.TILED)
                    assert_same_bits(few, whole[:rows])
                    with monkeypatch.context() as patch:
                        patch.setattr("kernels.linear.fp32.hopper.MOST_ROWS", 0)
                        assert_same_bits(few, linear(x[:rows], weight, given, route=Route.TILED))
        beside = wide[:32, :depth].contiguous()
        wanted = linear(beside, weight, route=Route.TILED)[1::2]
        beside[::2] = float("nan")
        assert_same_bits(linear(beside, weight, route=Route.TILED)[1::2], wanted)

    @pytest.mark.parametrize("rows", [3, 16, 32])
    def test_rows_that_the_launch_before_writes_late_are_seen(self, rows: int) -> None:
        from tests.kernels.late_writer import write_late

        x, weight = made(rows, 2304, device=GPU), made(256, 2304, dtype=FULL, device=GPU, seed=1)
        wanted = linear(x, weight, route=Route.TILED)
        numbers = x.view(torch.int32)
        right = numbers.clone()
        for _ in range(3):
            numbers.zero_()
            torch.cuda.synchronize()
            write_late[(1,)](right, numbers, numbers.numel(), 500_000, num_warps=4)
            assert_same_bits(linear(x, weight, route=Route.TILED), wanted)

    @pytest.mark.parametrize("rows", [1, 16, 32])
    def test_a_captured_chain_has_the_bits_of_launches_one_by_one(self, rows: int) -> None:
        """Norms and products through buffers that are taken again and again, replayed with other rows."""
        depth = 2304
        norm = made(depth, device=GPU)
        weights = [made(depth, depth, dtype=FULL, device=GPU, seed=at) / 48 for at in range(6)]

        def chain(x: torch.Tensor, wait: bool = False) -> torch.Tensor:
            for weight in weights:
                for step in (lambda y: rms_norm(y, norm, 1e-5), lambda y, w=weight: linear(y, w, route=Route.TILED)):
                    x = step(x).to(HALF)
                    if wait:
                        torch.cuda.synchronize()
            return x

        inputs = [made(rows, depth, device=GPU, seed=seed) for seed in range(8)]
        one_by_one = [chain(x, wait=True) for x in inputs]
        given = inputs[0].clone()
        chain(given)
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            out = chain(given)
        for _ in range(20):
            for x, wanted in zip(inputs, one_by_one, strict=True):
                given.copy_(x)
                graph.replay()
                assert_same_bits(out, wanted)
