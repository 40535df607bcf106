"""What an op cannot work with is refused before anything is launched, by name and with the offending value."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.append_kv import append_kv
from kernels.backend import Backend
from kernels.copy_pages import pack_pages, unpack_pages
from kernels.decode_attention import decode_attention
from kernels.errors import KernelArgumentError
from kernels.gather_pages import gather_pages, scatter_pages
from kernels.layout import KvLayout
from kernels.merge_attention_states import merge_attention_states
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import CaseShape, PagedCase, make_case, running_sums

CASE = make_case([(16, 4), (0, 3)], CaseShape())
HALVES = torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16)


def prefill(case: PagedCase = CASE, **changed: object) -> None:
    given: dict[str, object] = {
        "q": case.q,
        "k_pages": case.k_pages,
        "v_pages": case.v_pages,
        "block_tables": case.block_tables,
        "cu_seqlens_q": case.cu_seqlens_q,
        "cu_seqlens_k": case.cu_seqlens_k,
        "max_seqlen_q": case.max_seqlen_q,
    }
    prefill_attention(**(given | changed))  # type: ignore[call-overload]


def decode(**changed: object) -> None:
    given: dict[str, object] = {
        "q": CASE.q[:2],
        "k_pages": CASE.k_pages,
        "v_pages": CASE.v_pages,
        "block_tables": CASE.block_tables,
        "seqlens_k": CASE.seqlens_k,
    }
    decode_attention(**(given | changed))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": CASE.q[0]}, r"q: shape must be \[any, any, 64\], got \[4, 64\]"),
        ({"q": CASE.q[..., :32]}, r"q: shape must be \[any, any, 64\], got \[7, 4, 32\]"),
        ({"q": CASE.q.float()}, r"q: dtype must be one of \['torch.bfloat16'\], got torch.float32"),
        ({"q": CASE.q[:, :3]}, "q: 3 heads are not a multiple of the pages' 2 heads"),
        ({"q": CASE.q.transpose(1, 2).contiguous().transpose(1, 2)}, "q: the last axis must have stride 1"),
        ({"q": CASE.q.to("meta")}, "q: must be on cpu, is on meta"),
        ({"k_pages": CASE.k_pages[..., ::2]}, "v_pages: shape must be"),
        ({"k_pages": CASE.k_pages.transpose(1, 2)}, "v_pages: shape must be"),
        ({"v_pages": CASE.v_pages.half()}, "v_pages: dtype must be one of"),
        ({"v_pages": CASE.k_pages}, "k_pages: shares memory with v_pages"),
        ({"layout": KvLayout.SHUFFLE}, "k_pages: SHUFFLE has 5 axes"),
        ({"block_tables": CASE.block_tables.long()}, "block_tables: dtype must be one of"),
        ({"block_tables": CASE.block_tables[:1]}, r"block_tables: shape must be \[2, any\], got \[1, "),
        ({"window": -1}, r"window: must be 0 \(unlimited\) or positive, got -1"),
        ({"scale": float("nan")}, "scale: must be finite, got nan"),
        ({"sinks": torch.zeros(2)}, r"sinks: shape must be \[4\], got \[2\]"),
        ({"sinks": torch.zeros(4).half()}, "sinks: dtype must be one of .* got torch.float16"),
        ({"sinks": torch.zeros(8)[::2]}, "sinks: must be contiguous"),
        ({"out": CASE.q[:2]}, "out: "),
    ],
)
@pytest.mark.parametrize("op", [prefill, decode])
def test_attention(op: Callable[..., None], change: dict[str, object], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        op(**change)


def test_attention_refuses_pages_that_are_not_dense() -> None:
    wide = torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(KernelArgumentError, match="k_pages: a page must be dense"):
        prefill(k_pages=wide, v_pages=torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16))
    folded = torch.zeros(4096, dtype=torch.bfloat16).as_strided((4, 16, 2, 64), (64, 128, 64, 1))
    with pytest.raises(KernelArgumentError, match="k_pages: pages overlap"):
        prefill(k_pages=folded, v_pages=torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16))


def test_running_sums() -> None:
    with pytest.raises(KernelArgumentError, match=r"cu_seqlens_k: shape must be \[3\], got \[4\]"):
        prefill(cu_seqlens_k=running_sums([20, 3, 1]))
    with pytest.raises(KernelArgumentError, match="cu_seqlens_q: dtype must be"):
        prefill(cu_seqlens_q=CASE.cu_seqlens_q.long())
    with pytest.raises(KernelArgumentError, match="cu_seqlens_q: must be contiguous"):
        prefill(cu_seqlens_q=running_sums([4, 0, 3, 0])[::2])
    with pytest.raises(KernelArgumentError, match="max_seqlen_q: must not be negative, got -1"):
        prefill(max_seqlen_q=-1)
    with pytest.raises(KernelArgumentError, match=r"seqlens_k: shape must be \[2\], got \[1\]"):
        decode(seqlens_k=CASE.seqlens_k[:1])


def test_the_output_may_not_overlap_an_input() -> None:
    with pytest.raises(KernelArgumentError, match="out: shares memory with q"):
        prefill(out=CASE.q)
    pages = CASE.k_pages.clone()
    with pytest.raises(KernelArgumentError, match="out: shares memory with k_pages"):
        prefill(k_pages=pages, out=pages.view(-1, 4, 64)[:7])
    out = torch.empty_like(CASE.q)
    with pytest.raises(KernelArgumentError, match="out: shares memory with sinks"):
        prefill(out=out, sinks=out[0, 0, :4])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (CaseShape(dim=40), r"dim: must be one of \(16, .*, got 40"),
        (CaseShape(page_tokens=24), "page_tokens: must be a power of two up to 256, got 24"),
        (CaseShape(q_heads=34, kv_heads=2), "q: at most 16 query heads share a kv head, got 17"),
    ],
)
def test_what_only_the_references_can_do(shape: CaseShape, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(3, 4)], shape)
    prefill(case)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelArgumentError, match=message):
        prefill(case, backend=Backend.TRITON)


def test_triton_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelArgumentError, match=r"backend TRITON needs a CUDA tensor .* is on cpu"):
        prefill(backend=Backend.TRITON)


SLOTS = torch.tensor([0, 1, 2])
ROWS = torch.zeros(3, 2, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("k", "slots", "message"),
    [
        (ROWS[:2], SLOTS, r"k: shape must be \[3, 2, 64\], got \[2, 2, 64\]"),
        (ROWS.half(), SLOTS, "k: dtype must be one of"),
        (ROWS[:, :1], SLOTS, "k: shape must be"),
        (ROWS, SLOTS.int(), "slot_mapping: dtype must be one of"),
        (ROWS, torch.zeros(6, dtype=torch.int64)[::2], "slot_mapping: must be contiguous"),
        (ROWS, SLOTS.view(3, 1), "slot_mapping: shape must be"),
    ],
)
def test_append(k: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    k_pages, v_pages = CASE.k_pages.clone(), CASE.v_pages.clone()
    with pytest.raises(KernelArgumentError, match=message):
        append_kv(k, ROWS, k_pages, v_pages, slots)
    assert_same_bits(k_pages, CASE.k_pages)
    assert_same_bits(v_pages, CASE.v_pages)


def test_append_refuses_overlaps() -> None:
    pages = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(KernelArgumentError, match="k_pages: shares memory with k"):
        append_kv(pages[0, :3], ROWS, pages, pages.clone(), SLOTS)
    with pytest.raises(KernelArgumentError, match="k_pages: shares memory with v_pages"):
        append_kv(ROWS, ROWS, HALVES[:2, 0], HALVES[1:3, 0], SLOTS)


def test_gather_and_scatter() -> None:
    args = (CASE.k_pages, CASE.v_pages, CASE.block_tables)
    with pytest.raises(KernelArgumentError, match="total_tokens: must not be negative, got -1"):
        gather_pages(*args, CASE.cu_seqlens_k, -1)
    with pytest.raises(KernelArgumentError, match=r"cu_seqlens_k: shape must be \[num_seqs \+ 1\]"):
        gather_pages(*args, CASE.cu_seqlens_k[:0], 0)
    k, v = gather_pages(*args, CASE.cu_seqlens_k, CASE.total_tokens)
    with pytest.raises(KernelArgumentError, match=r"v: shape must be \[23, 2, 64\], got \[22, 2, 64\]"):
        scatter_pages(k, v[:22], *args, CASE.cu_seqlens_k)
    with pytest.raises(KernelArgumentError, match="k_pages: shares memory with k"):
        scatter_pages(CASE.k_pages.view(-1, 2, 64)[:23], v, *args, CASE.cu_seqlens_k)


def test_copies() -> None:
    pages, ids, packed = torch.zeros(4, 6), torch.tensor([1, 2]), torch.zeros(2, 24, dtype=torch.uint8)
    with pytest.raises(KernelArgumentError, match=r"packed rows: shape must be \[2, 24\], got \[2, 23\]"):
        pack_pages(pages, ids, packed[:, :23])
    with pytest.raises(KernelArgumentError, match="page_ids: dtype must be one of"):
        pack_pages(pages, ids.short(), packed)
    with pytest.raises(KernelArgumentError, match="pages: must be contiguous"):
        unpack_pages(packed, pages[:, ::2], ids)
    with pytest.raises(KernelArgumentError, match=r"page_axis: pages of shape \[4, 6\] cannot be counted by axis 1"):
        pack_pages(pages, ids, packed, page_axis=1)
    with pytest.raises(KernelArgumentError, match="out: shares memory with pages"):
        pack_pages(pages, ids, pages.view(torch.uint8)[:2])


def test_merge() -> None:
    out, lse = torch.zeros(3, 2, 8), torch.zeros(2, 3)
    with pytest.raises(KernelArgumentError, match=r"lse_b: shape must be \[2, 3\], got \[3, 2\]"):
        merge_attention_states(out, lse, out, lse.T)
    with pytest.raises(KernelArgumentError, match="out_b: dtype must be one of"):
        merge_attention_states(out, lse, out.half(), lse)
    with pytest.raises(KernelArgumentError, match=r"out_a: shape must be \[any, any, any\], got \[3, 2\]"):
        merge_attention_states(out[..., 0], lse, out, lse)


def test_a_layout_is_told_never_guessed() -> None:
    """16 heads and 16 slots: HND pages have NHD's shape, so only the recorded layout can tell them apart."""
    case = make_case([(0, 9)], CaseShape(q_heads=16, kv_heads=16, dim=16, layout=KvLayout.HND))
    other = replace(case, layout=KvLayout.NHD)
    keys, _ = gather_pages(other.k_pages, other.v_pages, other.block_tables, other.cu_seqlens_k, 9, layout=KvLayout.NHD)
    assert not torch.equal(keys, case.keys[0])


def test_an_op_without_a_gluon_kernel_says_so() -> None:
    """Rather than to compute with something else in silence."""
    x = torch.zeros(2, 16)
    with pytest.raises(KernelArgumentError, match="backend GLUON: this op has no such kernel"):
        rms_norm(x, torch.ones(16), 1e-5, backend=Backend.GLUON)
