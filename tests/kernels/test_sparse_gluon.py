"""The Gluon kernels of sparse attention on a Hopper GPU: right, invariant, replayable; and which cases they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.backend import Backend, is_hopper
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3
from kernels.graph_capture import graph_capture
from kernels.index_logits import hopper as index_hopper
from kernels.index_logits import index_logits
from kernels.index_logits.call import IndexLogitsCall
from kernels.key_rows import KeyRows
from kernels.sparse_latent_attention import hopper as sparse_hopper
from kernels.sparse_latent_attention import sparse_latent_attention
from kernels.sparse_latent_attention.call import SparseLatentCall
from kernels.top_k import top_k
from tests.device_waits import no_device_waits
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.sparse_inputs import SparseCase, make_sparse, random_rows

# Decode rows, prompts fresh and behind a cached prefix, one without new tokens; few rows in spans, many in tiles.
FEW = [(1300, 1), (0, 1), (60, 13), (0, 27), (5000, 4), (40, 0), (2000, 2)]
MANY = [(1300, 1), (0, 1), (60, 130), (0, 270), (700, 40), (40, 0), (2000, 2)]
# A prompt behind a prefix, whose tiles end within a block of keys.
PROMPT = [(5, 1), (0, 1), (515, 1030)]
INDEX_DIM, WIDTH, LATENT, SCALE = 128, 576, 512, 0.07


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def moved(case: SparseCase) -> SparseCase:
    """The same sequences in other pages."""
    order = torch.randperm(case.pages.shape[0], device=case.pages.device)
    scales = None if case.scales is None else case.scales[order]
    tables = torch.argsort(order)[case.block_tables.long()].int()
    return replace(case, pages=case.pages[order], scales=scales, block_tables=tables)


def index_inputs(case: SparseCase, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries as slices of wider rows, which begin at a multiple of 16 bytes, and weights of both signs."""
    device, dtype = str(case.pages.device), case.pages.dtype
    wide = random_rows(case.num_tokens, heads * INDEX_DIM + 16, dtype=dtype, device=device)
    weights = random_rows(case.num_tokens, heads, dtype=torch.float32, device=device, seed=2)
    return wide[:, 16:].view(case.num_tokens, heads, INDEX_DIM), weights


def scored(
    case: SparseCase,
    inputs: tuple[torch.Tensor, torch.Tensor],
    backend: Backend,
    rows: slice = slice(None),
    **more: Any,
) -> torch.Tensor:
    """NaN where nothing is written."""
    q, weights = (part[rows] for part in inputs)
    out = torch.full((q.shape[0], case.max_keys), float("nan"), device=q.device)
    where = (case.pages, case.block_tables, case.rows.part(rows), case.max_keys)
    return index_logits(q, weights, *where, scales=case.scales, out=out, backend=backend, **more)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("lengths", [FEW, MANY, PROMPT], ids=["few", "tiles", "prompt"])
class TestIndexLogits:
    @pytest.mark.parametrize(("heads", "page_tokens"), [(64, 16), (64, 64), (32, 8), (64, 256)])
    def test_logits_are_the_plain_kernels_bit_for_bit(
        self, lengths: list[tuple[int, int]], fp8: bool, heads: int, page_tokens: int
    ) -> None:
        """So the choice of a kernel may depend on the launch's size; logits that no row sees are not written."""
        page_tokens = max(page_tokens, 16) if fp8 else page_tokens
        case = make_sparse(lengths, INDEX_DIM, num_decode=2, device="cuda", page_tokens=page_tokens, fp8=fp8)
        inputs = index_inputs(case, heads)
        for least in (0, 100):
            got = scored(case, inputs, Backend.GLUON, least_keys=least)
            assert_same_bits(got, scored(case, inputs, Backend.TRITON, least_keys=least))
            wanted = scored(case, inputs, Backend.REFERENCE, least_keys=least)
            # Hopper's tensor cores add products of fp8 up with 14 bits.
            tolerance = 1e-3 * float(wanted.nan_to_num().max()) if fp8 else 1e-3
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=tolerance, equal_nan=True)

    def test_spans_have_the_bits_of_blocks(
        self, lengths: list[tuple[int, int]], fp8: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kernels.index_logits.hopper import launch

        case = make_sparse(lengths, INDEX_DIM, num_decode=2, device="cuda", page_tokens=64, fp8=fp8)
        inputs = index_inputs(case, 64)
        some = slice(0, 40)
        wanted = scored(case, inputs, Backend.GLUON, some)
        monkeypatch.setattr(launch, "MOST_BLOCK_LOGITS", 0)
        assert_same_bits(scored(case, inputs, Backend.GLUON, some), wanted)

    @pytest.mark.parametrize(("heads", "page_tokens"), [(64, 16), (64, 64), (32, 8), (64, 256)])
    def test_wide_blocks_have_the_bits_of_tiles(
        self, lengths: list[tuple[int, int]], fp8: bool, heads: int, page_tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Few rows too, of runs that are no multiple of four; and with tiles of more rows."""
        if fp8:
            pytest.skip("wide blocks are of keys of 16 bits")
        from kernels.index_logits.hopper import launch

        case = make_sparse(lengths, INDEX_DIM, num_decode=2, device="cuda", page_tokens=page_tokens)
        inputs = index_inputs(case, heads)
        for least in (0, 100):
            wanted = scored(case, inputs, Backend.GLUON, least_keys=least)
            monkeypatch.setattr(launch, "launch_by", lambda call: launch._launch_wide)
            assert_same_bits(scored(case, inputs, Backend.GLUON, least_keys=least), wanted)
            monkeypatch.setattr(launch, "WIDER_LOGITS", 0)
            assert_same_bits(scored(case, inputs, Backend.GLUON, least_keys=least), wanted)
            monkeypatch.undo()

    def test_fp16(self, lengths: list[tuple[int, int]], fp8: bool) -> None:
        if fp8:
            pytest.skip("queries and keys are fp8, whatever the model's dtype")
        case = make_sparse(lengths, INDEX_DIM, num_decode=2, device="cuda", dtype=torch.float16)
        inputs = index_inputs(case, 64)
        assert_same_bits(scored(case, inputs, Backend.GLUON), scored(case, inputs, Backend.TRITON))

    def test_neither_mates_nor_cuts_nor_pages_change_a_bit(self, lengths: list[tuple[int, int]], fp8: bool) -> None:
        case = make_sparse(lengths, INDEX_DIM, num_decode=2, device="cuda", fp8=fp8)
        inputs = index_inputs(case, 64)
        together = scored(case, inputs, Backend.GLUON)
        assert_same_bits(scored(moved(case), inputs, Backend.GLUON), together)
        cut = case.num_tokens // 3
        for rows in (slice(0, 1), slice(2, 3), slice(cut, cut + 20), slice(1, cut), slice(cut, case.num_tokens)):
            assert_same_bits(scored(case, inputs, Backend.GLUON, rows), together[rows])

    def test_a_captured_launch_replays_without_a_wait(self, lengths: list[tuple[int, int]], fp8: bool) -> None:
        case = make_sparse(lengths, INDEX_DIM, num_decode=2, device="cuda", fp8=fp8)
        inputs = index_inputs(case, 64)
        wanted = scored(case, inputs, Backend.GLUON)
        with no_device_waits():
            scored(case, inputs, Backend.GLUON)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            got = scored(case, inputs, Backend.GLUON)
        graph.replay()
        assert_same_bits(got, wanted)


def latent_case(page_tokens: int = 16) -> SparseCase:
    lengths = [(2300, 1), (0, 1), (0, 20), (2050, 9), (40, 0), (127, 2)]
    return make_sparse(lengths, WIDTH, num_decode=2, device="cuda", page_tokens=page_tokens)


def sparse_call(case: SparseCase, heads: int, k: int) -> SparseLatentCall:
    device = str(case.pages.device)
    logits = random_rows(case.num_tokens, case.max_keys, dtype=torch.float32, device=device, seed=4)
    q = random_rows(case.num_tokens, heads, WIDTH, device=device)
    chosen = top_k(logits, case.rows.num_keys, k)
    return SparseLatentCall(q, case.pages, case.block_tables, case.rows, chosen, SCALE, LATENT)


def attended(call: SparseLatentCall, backend: Backend, rows: slice = slice(None)) -> torch.Tensor:
    where = (call.pages, call.block_tables, call.rows.part(rows), call.chosen[rows])
    return sparse_latent_attention(call.q[rows], *where, scale=call.scale, latent=call.latent, backend=backend)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestSparseLatentAttention:
    @pytest.mark.parametrize(("heads", "page_tokens", "k"), [(128, 16, 2048), (16, 64, 1500), (20, 1, 100)])
    def test_against_the_reference_and_the_plain_kernel(self, heads: int, page_tokens: int, k: int) -> None:
        case = latent_case(page_tokens)
        call = sparse_call(case, heads, k)
        got, live = attended(call, Backend.GLUON), case.rows.num_keys > 0
        for backend in (Backend.REFERENCE, Backend.TRITON):
            assert_output(got[live], attended(call, backend)[live].double())
        assert not got[~live].any()

    @pytest.mark.parametrize(("heads", "k"), [(128, 2048), (16, 2048)])
    def test_pieces_of_one_program_or_of_several(self, heads: int, k: int) -> None:
        """A launch of few rows gives a query's pieces to several programs: that changes no bit."""
        from kernels.sparse_latent_attention.hopper.launch import attend

        call = sparse_call(latent_case(), heads, k)
        outs = [torch.full((*call.q.shape[:2], LATENT), float("nan"), dtype=call.q.dtype, device="cuda") for _ in "ab"]
        for out, splits in zip(outs, (False, True), strict=True):
            attend(call, out, splits=splits)
        assert_same_bits(*outs)

    def test_neither_mates_nor_cuts_nor_pages_change_a_bit(self) -> None:
        """Alone a query takes the launches for few rows, some of them split their pieces, all together do not."""
        case = latent_case()
        call = sparse_call(case, 128, 2048)
        call = call._replace(  # 4 times the rows: more than half of any card's multiprocessors have work
            q=call.q.repeat(4, 1, 1),
            rows=KeyRows(*(part.repeat(4) for part in call.rows)),
            chosen=call.chosen.repeat(4, 1),
        )
        together, other = attended(call, Backend.GLUON), moved(case)
        for _ in range(5):
            again = call._replace(pages=other.pages, block_tables=other.block_tables)
            assert_same_bits(attended(again, Backend.GLUON), together)
        for rows in (slice(0, 1), slice(1, 2), slice(22, 30), slice(5, 24), slice(40, 130)):
            assert_same_bits(attended(call, Backend.GLUON, rows), together[rows])

    def test_a_captured_launch_replays_without_a_wait(self) -> None:
        call = sparse_call(latent_case(), 128, 2048)
        wanted = attended(call, Backend.GLUON)
        with no_device_waits():
            attended(call, Backend.GLUON)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            got = attended(call, Backend.GLUON)
        graph.replay()
        assert_same_bits(got, wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("rows", "width"), [(1, 70_001), (200, 70_001), (3, 6000), (200, 6000)])
def test_a_choice_without_a_good_guess(rows: int, width: int) -> None:
    """Logits that a sample says little about: steps, a slope, all alike, the largest side by side."""
    k = 2048
    made = random_rows(rows, width, dtype=torch.float32, device="cuda") * 3
    near = made.clone()
    near[:, -3000:] += 9
    counts = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    counts[rows // 2 :] -= 777
    for logits in (made, (made * 2).round(), made.sort(dim=1).values, torch.zeros_like(made), near):
        some = torch.arange(0, rows, 40, device="cuda")
        wanted = top_k(logits[some], counts[some], k, backend=Backend.REFERENCE)
        assert_same_bits(top_k(logits, counts, k)[some], wanted)


def index_call(**change: Any) -> IndexLogitsCall:
    options = {"heads": 64, "dim": 128, "page_tokens": 16, "dtype": torch.bfloat16, **change}
    dtype, dim = options["dtype"], options["dim"]
    q = torch.zeros(2, options["heads"], dim, dtype=dtype)
    rows = KeyRows(*(torch.zeros(2, dtype=torch.int32) for _ in range(2)))
    pages = torch.zeros(9, options["page_tokens"], dim + options.get("gap", 0), dtype=dtype)[..., :dim]
    return IndexLogitsCall(
        q, torch.zeros(q.shape[:2]), pages, torch.zeros(1, 4, dtype=torch.int32), rows, 30, options.get("scales"), 0
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"heads": 32, "page_tokens": 8, "dtype": torch.float16}, None),
        ({"page_tokens": 256}, None),
        ({"heads": 16}, "16 heads of 128"),
        ({"dim": 64}, "64 heads of 64"),
        ({"page_tokens": 4}, "page_tokens 4"),
        ({"page_tokens": 8, "dtype": E4M3, "scales": torch.zeros(9, 8)}, "page_tokens 8"),
        ({"page_tokens": 24}, "page_tokens 24"),
        ({"dtype": torch.float32}, "torch.float32 queries"),
        ({"dtype": E4M3, "scales": torch.zeros(9, 16)}, None),
        ({"gap": 4}, "pages not aligned"),
    ],
)
def test_which_logits_the_kernels_take(change: dict[str, Any], reason: str | None) -> None:
    """Written down, so that a case cannot fall back to the plain kernel unseen."""
    got = index_hopper.reason_against_case(index_call(**change))
    assert got is None if reason is None else reason in str(got)


@pytest.mark.parametrize(
    ("rows", "keys", "sequences", "fp8", "tiled", "plain"),
    [
        (255, 4096, 1, False, False, False),
        (300, 4096, 300, False, False, False),
        (448, 1023, 3, False, True, True),
        (448, 1024, 3, False, True, False),
        (2048, 16_384, 3, False, True, False),
        (2048, 1023, 3, True, True, True),
        (2048, 1024, 3, True, True, False),
    ],
)
def test_which_kernel_a_launch_takes(rows: int, keys: int, sequences: int, fp8: bool, tiled: bool, plain: bool) -> None:
    """Prompts go in tiles, short ones to the plain kernel; as many sequences as rows decode."""
    call = index_call(**({"dtype": E4M3, "scales": torch.zeros(9, 16)} if fp8 else {}))
    call = call._replace(
        q=call.q[:1].expand(rows, -1, -1), block_tables=call.block_tables.expand(sequences, -1), max_keys=keys
    )
    assert (index_hopper.is_tiled(call), index_hopper.is_better_plain(call)) == (tiled, plain)


@pytest.mark.parametrize(
    ("rows", "keys", "sequences", "change", "wanted"),
    [
        (16, 65_536, 16, {}, "blocks"), (17, 65_536, 17, {}, "spans"), (100, 4096, 1, {}, "blocks"),
        (300, 4096, 1, {}, "tiles"), (2048, 12_000, 1, {}, "tiles"), (2048, 16_384, 1, {}, "wide"),
        (2048, 16_384, 1, {"dtype": E4M3, "scales": torch.zeros(9, 64)}, "tiles"),
        (1, 4096, 1, {"heads": 32}, "spans"), (1, 4096, 1, {"page_tokens": 16}, "spans"),
        (1, 4096, 1, {"dtype": torch.float16}, "spans"),
    ],
)  # fmt: skip
def test_how_a_launch_is_divided(rows: int, keys: int, sequences: int, change: dict[str, Any], wanted: str) -> None:
    launch = pytest.importorskip("kernels.index_logits.hopper.launch")
    call = index_call(**{"page_tokens": 64, **change})
    call = call._replace(
        q=call.q[:1].expand(rows, -1, -1), block_tables=call.block_tables.expand(sequences, -1), max_keys=keys
    )
    assert launch.launch_by(call).__name__ == f"_launch_{wanted}"


def test_spans_are_shorter_where_programs_are_few() -> None:
    pytest.importorskip("triton")
    from kernels.index_logits.hopper.launch import span_keys

    assert [span_keys(*size, 132) for size in ((1, 65_536), (16, 65_536), (64, 65_536))] == [256, 1024, 2048]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"latent": 448}, "rows of 448 + 128"),
        ({"dtype": torch.float16}, "torch.float16 queries"),
        ({"gap": 16}, "pages not whole rows"),
    ],
)
def test_which_latents_the_kernel_takes(change: dict[str, Any], reason: str | None) -> None:
    options = {"dtype": torch.bfloat16, "latent": LATENT, "gap": 0, **change}
    pages = torch.zeros(9, 16 * WIDTH + options["gap"], dtype=options["dtype"])[:, : 16 * WIDTH].view(9, 16, WIDTH)
    q = torch.zeros(2, 7, WIDTH, dtype=options["dtype"])
    rows = KeyRows(*(torch.zeros(2, dtype=torch.int32) for _ in range(2)))
    tables, chosen = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    call = SparseLatentCall(q, pages, tables, rows, chosen, SCALE, options["latent"])
    got = sparse_hopper.reason_against_case(call)
    assert got is None if reason is None else reason in str(got)


@pytest.mark.parametrize(
    ("tokens", "heads", "few"),
    [(1, 128, True), (6, 128, True), (7, 128, False), (6, 65, True), (12, 16, True), (13, 1, False)],
)
def test_which_launches_have_few_rows(tokens: int, heads: int, few: bool) -> None:
    assert sparse_hopper.is_few(tokens, heads) is few


@pytest.mark.parametrize(
    ("tokens", "heads", "form"),
    [
        (1, 128, (64, 32)), (2, 128, (64, 32)), (3, 128, (64, 64)), (1, 64, (32, 16)), (4, 64, (64, 32)),
        (5, 64, (64, 64)), (1, 16, (32, 8)), (1, 1, (32, 8)), (12, 16, (64, 16)),
        (4, 33, (64, 32)), (9, 33, (64, 64)),
    ],
)  # fmt: skip
def test_programs_of_few_rows_are_larger_where_they_are_many(tokens: int, heads: int, form: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    from kernels.sparse_latent_attention.hopper.few_launch import form_of

    assert form_of(tokens, heads, 2048, 132) == form


def test_asking_for_the_kernels_where_they_cannot_run_is_refused() -> None:
    call = index_call()
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        index_logits(*call[:6], backend=Backend.GLUON)
    q, chosen = torch.zeros(2, 7, WIDTH, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.int32)
    where = (torch.zeros(9, 16, WIDTH, dtype=q.dtype), call.block_tables, call.rows, chosen)
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        sparse_latent_attention(q, *where, scale=SCALE, latent=LATENT, backend=Backend.GLUON)
