"""compressed_attention's Gluon kernel on a Hopper GPU: right, invariant, replayable; and which cases it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.backend import Backend, is_hopper
from kernels.compressed_attention import compressed_attention
from kernels.compressed_attention.call import CompressedCall, EntryPages
from kernels.compressed_attention.hopper import reason_against_case
from kernels.errors import KernelArgumentError
from kernels.graph_capture import graph_capture
from kernels.key_rows import KeyRows
from tests.device_waits import no_device_waits
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.compressed_inputs import CompressedCase, CompressedShape, make_compressed
from tests.kernels.test_compressed_attention import only

# Decode rows around the end of a block and of a tile, a chunk behind a prefix, a fresh prompt, one without new tokens.
LENGTHS = [(2600, 1), (15, 1), (0, 1), (191, 1), (0, 5), (127, 3), (930, 6), (40, 0)]
NUM_DECODE = 4


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def make(heads: int = 128, **shape: Any) -> CompressedCase:
    wanted = CompressedShape(heads=heads, dim=512, device="cuda", **shape)
    return make_compressed(LENGTHS, wanted, num_decode=NUM_DECODE)


def check(case: CompressedCase) -> None:
    out = case.run(Backend.GLUON)
    assert_output(out, case.truth(range(out.shape[0])))
    assert not out[case.rows.num_keys == 0].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnHopper:
    @pytest.mark.parametrize("k", [0, 300])
    @pytest.mark.parametrize("heads", [1, 16, 64, 65, 128])
    def test_any_number_of_heads(self, heads: int, k: int) -> None:
        check(make(heads, window_tokens=128, k=k))

    @pytest.mark.parametrize(
        "shape",
        [
            {"ratio": 0},  # a window alone
            {"ratio": 0, "window_tokens": 1},
            {"ratio": 16, "window_tokens": 100},  # one entry a page, and all are seen
            {"k": 5, "window_tokens": 63},
            {"k": 1000, "window_tokens": 65},  # more than there are
            {"ratio": 1, "window_tokens": 128},  # 2,729 keys
            {"ratio": 1, "k": 1500, "window_tokens": 1000},
            {"page_tokens": 128, "ratio": 128, "window_tokens": 200},
        ],
        ids=str,
    )
    def test_windows_entries_and_choices(self, shape: dict[str, Any]) -> None:
        check(make(65, **shape))

    @pytest.mark.parametrize("k", [0, 70])
    def test_nothing_behind_the_causal_cap_is_read(self, k: int) -> None:
        """Each row once more, with all that it may not read full of NaN."""
        case = make(k=k)
        together = case.run(Backend.GLUON)
        for token in range(case.rows.num_keys.shape[0] - 1):
            positions, entries = case.read_by(token)
            sequence = int(case.rows.sequences[token])
            kept = replace(
                case,
                window_pages=only(case.window_pages, case.window_tables[sequence], positions),
                entry_pages=only(case.entry_pages, case.entry_tables[sequence], entries),
            )
            assert_same_bits(kept.run(Backend.GLUON, slice(token, token + 1))[0], together[token])

    @pytest.mark.parametrize(("ratio", "k"), [(4, 512), (1, 0), (0, 0)])
    def test_neither_mates_nor_cuts_change_a_bit(self, ratio: int, k: int) -> None:
        """Alone, in parts, and 20 times side by side: more rows than a card has multiprocessors."""
        case = make(ratio=ratio, k=k, window_tokens=128)
        together = case.run(Backend.GLUON)
        for rows in (slice(0, 1), slice(1, 2), slice(3, 9), slice(5, 19)):
            assert_same_bits(case.run(Backend.GLUON, rows), together[rows])
        chosen = None if case.chosen is None else case.chosen.repeat(20, 1)
        rows = KeyRows(*(part.repeat(20) for part in case.rows))
        many = replace(case, q=case.q.repeat(20, 1, 1), rows=rows, chosen=chosen)
        for _ in range(3):
            assert_same_bits(many.run(Backend.GLUON), together.repeat(20, 1, 1))

    @pytest.mark.parametrize("heads", [1, 16, 65, 128])
    @pytest.mark.parametrize(("ratio", "k"), [(4, 512), (1, 1024), (1, 2000), (1, 0), (0, 0)])
    def test_launches_of_few_rows_have_the_same_bits(self, ratio: int, k: int, heads: int) -> None:
        """Lists that end with a tile and within one, of up to three pieces, and these in programs of their own; rows
        together and a few of them, whose programs have fewer heads."""
        from kernels.compressed_attention.hopper.launch import attend_few_rows, attend_rows

        case = make(heads, ratio=ratio, k=k, window_tokens=128)
        entries = None
        if ratio:
            entries = EntryPages(case.entry_pages, case.entry_tables, ratio, case.chosen)
        call = CompressedCall(
            case.q, case.window_pages, case.window_tables, case.rows, case.sinks, 0.2, 128, entries
        )  # fmt: skip
        outs = [torch.full_like(case.q, float("nan")) for _ in range(4)]
        attend_rows(call, outs[0], splits=False)
        attend_rows(call, outs[1], splits=True)
        attend_few_rows(call, outs[2])
        attend_few_rows(call, outs[3])
        for out in outs[1:]:
            assert_same_bits(out, outs[0])
        for rows in (slice(0, 1), slice(1, 2), slice(2, 4), slice(7, 11)):
            chosen = None if case.chosen is None else case.chosen[rows]
            some = call._replace(
                q=call.q[rows], rows=case.rows.part(rows), entries=entries and entries._replace(chosen=chosen)
            )
            out = torch.full_like(some.q, float("nan"))
            attend_few_rows(some, out)
            assert_same_bits(out, outs[0][rows])

    def test_a_captured_launch_replays_without_a_wait(self) -> None:
        """Captured over padding, which is of no sequence and sees no key."""
        case = make(k=70)
        wanted = case.run(Backend.GLUON)
        rows = KeyRows(torch.full_like(case.rows.sequences, -1), torch.zeros_like(case.rows.num_keys))
        blank = replace(case, rows=rows)
        with no_device_waits():
            blank.run(Backend.GLUON)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            got = blank.run(Backend.GLUON)
        graph.replay()
        assert not got.any()
        for static, part in zip(rows, case.rows, strict=True):
            static.copy_(part)
        graph.replay()
        assert_same_bits(got, wanted)


def call_of(**change: Any) -> CompressedCall:
    options = {"dtype": torch.bfloat16, "dim": 512, "gap": 0, "entry_gap": 0, "has_entries": True, **change}

    def paged(rows: int, gap: int) -> torch.Tensor:
        width = rows * options["dim"]
        return torch.zeros(9, width + gap, dtype=options["dtype"])[:, :width].view(9, rows, options["dim"])

    q = torch.zeros(2, 7, options["dim"], dtype=options["dtype"])
    rows = KeyRows(*(torch.zeros(2, dtype=torch.int32) for _ in range(2)))
    tables = torch.zeros(1, 4, dtype=torch.int32)
    entries = EntryPages(paged(4, options["entry_gap"]), tables, 4, None)
    return CompressedCall(
        q, paged(16, options["gap"]), tables, rows, torch.zeros(7), 1.0, 8, entries if options["has_entries"] else None
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"has_entries": False}, None),
        ({"dtype": torch.float16}, "torch.float16 queries"),
        ({"dim": 448}, "heads of 448 elements"),
        ({"gap": 16}, "window_pages not whole rows"),
        ({"entry_gap": 16}, "entry_pages not whole rows"),
        ({"gap": 512}, None),
    ],
    ids=str,
)
def test_which_cases_the_kernel_takes(change: dict[str, Any], reason: str | None) -> None:
    """Written down, so that a case cannot fall back to the plain kernel unseen."""
    got = reason_against_case(call_of(**change))
    assert got is None if reason is None else reason in str(got)


def test_a_cpu_is_refused() -> None:
    call = call_of(has_entries=False)
    where = (call.window_pages, call.window_tables, call.rows, call.sinks)
    with pytest.raises(KernelArgumentError, match="needs a Hopper GPU"):
        compressed_attention(call.q, *where, scale=1.0, window_tokens=8, backend=Backend.GLUON)


def test_which_kernels_a_launch_takes() -> None:
    """By tiles of heads and the pieces that lists may have; the bits are the same."""
    launch = pytest.importorskip("kernels.compressed_attention.hopper.launch")
    assert launch.is_few(16, 1) and launch.is_few(2, 8)
    assert not launch.is_few(17, 1) and not launch.is_few(4, 8)
    assert launch.is_split(4, 8, 132) and launch.is_split(66, 2, 132)
    assert not launch.is_split(67, 2, 132) and not launch.is_split(32, 1, 132)
    assert not launch.is_split(64, 17, 132), "more partial results than there is memory for"


@pytest.mark.parametrize(
    ("heads", "parts", "multiprocessors", "wanted"),
    [(128, 8, 132, 8), (64, 8, 132 - 18, 8), (128, 8, 132 - 36, 16), (8, 64, 132, 8), (16, 72, 132, 16)],
)
def test_how_many_heads_a_program_has(heads: int, parts: int, multiprocessors: int, wanted: int) -> None:
    """Few where all programs are on the card together."""
    launch = pytest.importorskip("kernels.compressed_attention.hopper.launch")
    assert launch.group_of(heads, parts, multiprocessors) == wanted
