"""compressed_attention: a window, then entries, then a sink, over poisoned pages, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.backend import Backend
from kernels.compressed_attention import compressed_attention
from kernels.errors import KernelArgumentError
from kernels.key_rows import KeyRows
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.compressed_inputs import CompressedCase, CompressedShape, make_compressed
from tests.kernels.conftest import INTERPRETING, rarely_interpreted
from tests.kernels.inputs import POISON, far_pages
from tests.kernels.target import Target

# Decode rows around the end of a block, a chunk behind a prefix, fresh ones, one without new tokens.
LENGTHS = [(130, 1), (15, 1), (0, 1), (0, 5), (93, 6), (40, 0)]
NUM_DECODE = 3


def make(target: Target, **shape: object) -> CompressedCase:
    return make_compressed(LENGTHS, CompressedShape(device=target.device, **shape), num_decode=NUM_DECODE)


def check(case: CompressedCase, target: Target) -> None:
    out = case.run(target.backend)
    assert_output(out, case.truth(range(out.shape[0])))
    assert not out[case.rows.num_keys == 0].any()


@pytest.mark.parametrize("heads", [2, 20, 128] if INTERPRETING else [1, 8, 20, 64, 128])
def test_any_number_of_heads(target: Target, heads: int) -> None:
    check(make(target, heads=heads), target)


@pytest.mark.parametrize(
    "shape",
    [
        {"ratio": 0},  # a window alone
        {"ratio": 16},  # one entry a page, and all are seen
        {"k": 5},  # some of them
        {"k": 70},  # more than there are
        {"window_tokens": 1, "k": 5},
        {"window_tokens": 200},
        {"page_tokens": 64, "ratio": 8, "dim": 64},
    ],
    ids=str,
)
def test_windows_entries_and_choices(target: Target, shape: dict[str, object]) -> None:
    check(make(target, **shape), target)


@pytest.mark.parametrize(("heads", "k"), [(3, 0), (3, 500), (80, 500), rarely_interpreted(80, 0)])
def test_pieces_have_the_same_bits_in_one_program_and_in_many(
    target: Target, k: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of up to 850 keys, which are three pieces; a row's list ends where one does, or is empty."""
    if target.backend is not Backend.TRITON:
        pytest.skip("the Triton kernel alone has pieces")
    from kernels.compressed_attention import triton

    shape = CompressedShape(heads=heads, ratio=2, window_tokens=200, k=k, dim=32, device=target.device)
    case = make_compressed([(1299, 1), (239, 1), (241, 1), (879, 2), (0, 2)], shape, num_decode=3)
    assert max(case.keys_of(0).shape[0], case.keys_of(3).shape[0]) > 2 * triton.PIECE
    outs = []
    for splits in (False, True):
        monkeypatch.setattr(triton, "is_split", lambda *_, splits=splits: splits)
        outs.append(case.run(target.backend))
        assert_output(outs[-1], case.truth(range(outs[-1].shape[0])))
    assert_same_bits(*outs)


def test_few_rows_are_split_and_many_are_not() -> None:
    triton = pytest.importorskip("kernels.compressed_attention.triton")
    assert triton.is_split(2, 4, 132) and triton.is_split(66, 2, 132)
    assert not triton.is_split(67, 2, 132) and not triton.is_split(2, 1, 132)
    assert not triton.is_split(64, 17, 132), "more partial results than there is memory for"


def test_dtypes(target: Target) -> None:
    for dtype in (torch.bfloat16, torch.float16) if target.backend.value == "triton" else target.dtypes:
        check(make(target, dtype=dtype, k=5), target)


def alone(case: CompressedCase, target: Target, token: int) -> torch.Tensor:
    return case.run(target.backend, slice(token, token + 1))[0]


@pytest.mark.parametrize("k", [0, 7])
def test_case_50_bits_are_the_same_alone_and_behind_others(target: Target, k: int) -> None:
    case = make(target, k=k)
    together = case.run(target.backend)
    for token in range(case.rows.num_keys.shape[0]):
        assert_same_bits(alone(case, target, token), together[token])


def test_bits_do_not_depend_on_the_order_of_pages(target: Target) -> None:
    shape = CompressedShape(device=target.device, k=7)
    one, other = (make_compressed(LENGTHS, shape, num_decode=NUM_DECODE, order=order) for order in (0, 5))
    assert not torch.equal(one.window_tables, other.window_tables)
    assert_same_bits(other.run(target.backend), one.run(target.backend))


@pytest.mark.parametrize("plane", ["window_pages", "entry_pages"])
def test_a_pool_beyond_two_billion_elements(target: Target, plane: str) -> None:
    """The highest page is one that a row reads."""
    case = make(target)
    tables = {"window_pages": case.window_tables, "entry_pages": case.entry_tables}[plane]
    pages = getattr(case, plane)[: int(tables.max()) + 1]
    far = replace(case, **{plane: far_pages(pages)})
    assert_same_bits(far.run(target.backend), case.run(target.backend))


@pytest.mark.parametrize("k", [0, 7])
def test_nothing_behind_the_causal_cap_is_read(target: Target, k: int) -> None:
    """Each row once more, with all that it may not read full of NaN: later tokens and entries of its own chunk too."""
    case = make(target, k=k)
    together = case.run(target.backend)
    for token in range(case.rows.num_keys.shape[0] - 1):
        positions, entries = case.read_by(token)
        sequence = int(case.rows.sequences[token])
        kept = replace(
            case,
            window_pages=only(case.window_pages, case.window_tables[sequence], positions),
            entry_pages=only(case.entry_pages, case.entry_tables[sequence], entries),
        )
        assert_same_bits(alone(kept, target, token), together[token])


def only(pages: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The pages with NaN wherever these places of one sequence are not."""
    kept, of_page = torch.full_like(pages, POISON), pages.shape[1]
    page, slot = table.long()[places // of_page], places % of_page
    kept[page, slot] = pages[page, slot]
    return kept


def what_rows_read(case: CompressedCase, target: Target) -> list[tuple[list[int], list[int]]]:
    """The positions and the entries that each row reads, taken from its output.

    Keys are unit vectors, of a position its own and of an entry one behind those, and all weights of a row are equal.
    """
    half = case.shape.dim // 2
    units = torch.eye(2 * half).to(case.q)
    places = ((case.window_pages, case.window_tables, 0), (case.entry_pages, case.entry_tables, half))
    for pages, tables, first in places:
        held, at = tables > 0, torch.arange(tables.shape[1] * pages.shape[1]).view(-1, pages.shape[1]) % half
        for table, live in zip(tables.long(), held, strict=True):
            made = units[first + at[: int(live.sum())]]
            pages[table[live]] = made.masked_fill(pages[table[live]].isnan(), POISON)
    blank = replace(case, q=torch.zeros_like(case.q), sinks=torch.full_like(case.sinks, -torch.inf))
    out, read = blank.run(target.backend)[:, 0].float().cpu(), []
    for row in out:
        held = row.nonzero()[:, 0].tolist()
        assert not held or torch.allclose(row[held], torch.tensor(1.0 / len(held)), rtol=1e-2)
        read.append(([at for at in held if at < half], [at - half for at in held if at >= half]))
    return read


def test_case_49_each_row_reads_its_window_and_its_entries(target: Target) -> None:
    """Windows of 8 and entries of 8 tokens: a fresh prompt of 5 tokens, and 4 tokens behind 16."""
    shape = CompressedShape(dim=64, page_tokens=8, window_tokens=8, ratio=8, device=target.device)
    read = what_rows_read(make_compressed([(0, 5), (16, 4)], shape), target)
    fresh = [(list(range(end)), []) for end in (1, 2, 3, 4, 5)]
    behind = [(list(range(position - 7, position + 1)), [0, 1]) for position in (16, 17, 18, 19)]
    assert read == [*fresh, *behind, ([], [])]


@pytest.mark.parametrize(("ratio", "ends"), [(128, 128), (4, 4)])
@pytest.mark.parametrize("behind", [0, 2])
def test_case_53_an_entry_is_seen_from_the_end_of_its_block(target: Target, ratio: int, ends: int, behind: int) -> None:
    """The last two tokens of a block, whatever the chunk ends with."""
    shape = CompressedShape(dim=32, page_tokens=128, window_tokens=1, ratio=ratio, device=target.device)
    case = make_compressed([(ends - 2, 2 + behind)], shape)
    read = [entries for _, entries in what_rows_read(case, target)]
    assert read[:2] == [[], [0]] and read[2 : 2 + behind] == [[0]] * behind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 511)}, "q: shape must be"),
        ({"q": torch.zeros(2, 4, 512, dtype=torch.bfloat16)}, "q: dtype"),
        ({"window_pages": torch.zeros(9, 16)}, "window_pages: shape"),
        ({"entry_pages": torch.zeros(9, 4, 16)}, "entry_pages: shape"),
        ({"entry_tables": None}, "entry_pages: pages, tables and a ratio come together"),
        ({"entry_tables": torch.zeros(2, 4, dtype=torch.int32)}, "block_tables: shape"),
        ({"ratio": 0}, "entry_pages: pages, tables and a ratio come together"),
        ({"ratio": -4}, "ratio: must be positive"),
        ({"ratio": 0, "entry_pages": None, "entry_tables": None}, "chosen: there are no entries"),
        ({"chosen": torch.zeros(3, 8, dtype=torch.int32)}, "chosen: shape"),
        ({"chosen": torch.zeros(2, 0, dtype=torch.int32)}, "chosen: must have room"),
        ({"sinks": torch.zeros(3)}, "sinks: shape"),
        ({"window_tokens": 0}, "window_tokens: must be positive"),
        ({"window_tables": torch.zeros(3, 4)}, "block_tables: dtype"),
        ({"rows": KeyRows(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))}, "rows.sequences"),
        ({"out": torch.zeros(2, 4, 576)}, "out: shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 4, 512),
        "window_pages": torch.zeros(9, 16, 512),
        "window_tables": torch.zeros(3, 4, dtype=torch.int32),
        "rows": KeyRows(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        "sinks": torch.zeros(4),
        "scale": 1.0,
        "window_tokens": 8,
        "entry_pages": torch.zeros(9, 4, 512),
        "entry_tables": torch.zeros(3, 4, dtype=torch.int32),
        "ratio": 4,
        "chosen": torch.zeros(2, 8, dtype=torch.int32),
    }
    with pytest.raises(KernelArgumentError, match=message):
        compressed_attention(**{**arguments, **change})
