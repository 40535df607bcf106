"""compressed_attention and compress_tokens on a GPU in DeepSeek V4's sizes: against fp64, and bits that follow from
the row alone.

A row's cut, its mates, the order of pages, repetition and a captured graph change nothing. All memory that no
sequence holds is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from kernels.backend import Backend
from kernels.compress_tokens import compress_tokens
from kernels.graph_capture import graph_capture
from kernels.key_rows import KeyRows
from kernels.mix_streams import collapse_streams, expand_streams, join_streams
from kernels.rotate_append_tail import rotate_append_tail
from kernels.rotate_tail import rotate_tail
from tests.device_waits import no_device_waits
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.compressed_inputs import CompressedCase, CompressedShape, make_compressed
from tests.kernels.target import CUDA
from tests.kernels.test_compress_tokens import EPS
from tests.kernels.test_compress_tokens import make as make_raw

pytestmark = pytest.mark.gpu

WINDOW, PAGE = 128, 128
# Entries of 4 tokens, of which 512 or 1,024 are chosen, of 128, and no entries.
KINDS = {"CSA": (4, 512), "CSA 1024": (4, 1024), "HCA": (128, 0), "window": (0, 0)}
LENGTHS = [(5000, 1), (127, 1), (0, 1), (8191, 1), (2000, 300), (0, 140), (65_400, 40)]
NUM_DECODE = 4


@pytest.fixture(autouse=True)
def device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[64, 128, 16])
def heads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@cache
def make(kind: str, heads: int, order: int = 0) -> CompressedCase:
    """Returns the one case of this kind; no test changes it."""
    ratio, k = KINDS[kind]
    shape = CompressedShape(heads, 512, PAGE, WINDOW, ratio, k, torch.bfloat16, "cuda")
    return make_compressed(LENGTHS, shape, num_decode=NUM_DECODE, order=order)


def test_against_fp64(kind: str, heads: int) -> None:
    case = make(kind, heads)
    tokens = [*range(0, case.q.shape[0], 7), case.q.shape[0] - 1]
    assert_output(case.run(Backend.AUTO)[tokens], case.truth(tokens))


@pytest.mark.parametrize("size", [1, 3, 64, 301])
def test_bits_do_not_depend_on_the_cut(kind: str, heads: int, size: int) -> None:
    """Rows in launches of this many: within prompts, across their ends, and alone."""
    case = make(kind, heads)
    whole = case.run(Backend.AUTO)
    parts = range(0, whole.shape[0], size)
    assert torch.equal(torch.cat([case.run(Backend.AUTO, slice(at, at + size)) for at in parts]), whole)


def test_bits_do_not_depend_on_mates(kind: str, heads: int) -> None:
    """The same rows among others, in reverse."""
    case = make(kind, heads)
    whole = case.run(Backend.AUTO)
    order = torch.arange(whole.shape[0] - 1, -1, -1, device="cuda")
    chosen = None if case.chosen is None else case.chosen[order]
    rows = type(case.rows)(*(part[order] for part in case.rows))
    turned = replace(case, q=case.q[order], rows=rows, chosen=chosen)
    assert torch.equal(turned.run(Backend.AUTO), whole[order])


def test_bits_do_not_depend_on_the_order_of_pages(kind: str, heads: int) -> None:
    one, other = make(kind, heads), make(kind, heads, order=7)
    assert not torch.equal(one.window_tables, other.window_tables)
    assert torch.equal(other.run(Backend.AUTO), one.run(Backend.AUTO))


def test_a_captured_graph_replays_other_rows(kind: str, heads: int) -> None:
    """Lengths, tables and choices are read on the device: nothing waits for it, nothing is baked in."""
    case = make(kind, heads)
    wanted = case.run(Backend.AUTO)
    rows, q = type(case.rows)(*(part.clone() for part in case.rows)), case.q.clone()
    chosen = None if case.chosen is None else case.chosen.clone()
    static = replace(case, rows=rows, q=q, chosen=chosen)
    for part in (rows.sequences, rows.num_keys):
        part.fill_(0)
    static.run(Backend.AUTO)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = static.run(Backend.AUTO)
    for static_part, part in zip(rows, case.rows, strict=True):
        static_part.copy_(part)
    graph.replay()
    assert torch.equal(out, wanted)


def test_the_ops_around_it_wait_for_nothing_and_replay() -> None:
    """Raw rows and entries, keys, tails and streams: twice the same from a captured graph."""
    made, rng = make_raw(CUDA, 4, True, (700,), dim=512), torch.Generator("cuda").manual_seed(0)

    def drawn(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, generator=rng, device="cuda").to(dtype)

    table, count = made.tables[0].long(), 64
    positions = torch.arange(count, device="cuda") + 36
    slots = table[positions // made.raw_pages.shape[1]] * made.raw_pages.shape[1] + positions % made.raw_pages.shape[1]
    rows = KeyRows(torch.zeros_like(positions).int(), (positions + 1).int())
    q, k, pages = drawn(count, 64, 512), drawn(count, 512), drawn(*made.raw_pages.shape[:2], 512)
    streams, mixes, base, scale = (
        drawn(count, 4, 4096),
        *(drawn(*size, dtype=torch.float32) for size in ((count, 24), (24,), (3,))),
    )

    def call() -> list[torch.Tensor]:
        turned, keys, raw_pages, entries = q.clone(), pages.clone(), made.raw_pages.clone(), made.entry_pages.clone()
        compress_tokens(
            made.raw[0][36:100], raw_pages, slots, made.tables, rows, entries, made.entry_tables, ratio=4,
            overlap=True, bias=made.bias, norm=made.norm, eps=EPS, cos_sin=made.cos_sin,
        )  # fmt: skip
        rotate_append_tail(turned, k, positions, made.cos_sin, keys, slots, norm=made.norm, eps=EPS)
        rotate_tail(turned, positions, made.cos_sin, inverse=True)
        x, post, comb = collapse_streams(streams, mixes, base, scale, eps=EPS, num_iters=20)
        expanded = expand_streams(x, streams, post, comb)
        joined = join_streams(expanded, mixes[:, :4], base[:4], scale[:1], eps=EPS)
        return [raw_pages, entries, keys, turned, x, post, comb, expanded, joined]

    wanted = call()
    with no_device_waits():
        call()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        got = call()
    graph.replay()
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("ratio", "overlap", "dim"), [(4, True, 512), (4, True, 128), (128, False, 512)])
def test_entries_do_not_depend_on_the_cut_nor_on_mates(ratio: int, overlap: bool, dim: int) -> None:
    lengths = (700, 1024)
    whole = make_raw(CUDA, ratio, overlap, lengths, dim=dim)
    whole.launch(CUDA, *((sequence, 0, length) for sequence, length in enumerate(lengths)))
    for sequence, length in enumerate(lengths):
        for entry in range(0, length // ratio, 5):
            got, wanted = whole.entries(sequence)[entry].double(), whole.truth(sequence, entry)
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=4e-2)
    for cuts in ((512,), (1, 2, 127, 128, 129, 513), (3, 640, 699)):
        parted = whole.blank()
        for sequence, length in enumerate(lengths):
            for first, end in pairwise((0, *cuts, length)):
                parted.launch(CUDA, (sequence, first, end))
        for got, wanted in ((parted.entry_pages, whole.entry_pages), (parted.raw_pages, whole.raw_pages)):
            assert_same_bits(got, wanted)
