"""Which launches have few rows, and what `attend_few` knows of their tiles."""

import pytest
import torch

from kernels.attention import AttentionSpec
from kernels.fp8 import ScaleKind, Scales
from kernels.layout import KvLayout, PageShape
from kernels.prefill_attention.hopper.few import MOST_ROW_TILES, takes
from tests.kernels.test_prefill_work_list import DEVICES, tiles

pytest.importorskip("triton")

from kernels.prefill_attention.hopper.few.measure import launch

QWEN, LLAMA = (32, 4, 128), (32, 8, 128)


def spec_of(q_heads: int, heads: int, dim: int, window: int = 0, scales: Scales | None = None) -> AttentionSpec:
    return AttentionSpec(PageShape(9, 16, heads, dim), KvLayout.NHD, q_heads, 0.1, window, 0.0, scales)


@pytest.mark.parametrize(
    ("heads", "num_tokens", "num_seqs", "taken"),
    [
        (QWEN, 16, 1, True),
        (QWEN, 32, 1, True),
        (QWEN, 33, 1, False),
        (QWEN, 16, 2, True),
        (QWEN, 32, 2, False),
        (QWEN, 4, 4, True),
        (QWEN, 16, 8, False),
        (LLAMA, 16, 1, True),
        (LLAMA, 32, 1, True),
        (LLAMA, 33, 1, False),
        (LLAMA, 16, 2, True),
        (LLAMA, 17, 2, False),
        ((64, 8, 64), 16, 1, True),
        ((32, 32, 128), 1, 1, False),
        ((16, 4, 256), 1, 1, False),
        ((28, 4, 128), 1, 1, False),
    ],
)
def test_which_launches_have_few_rows(heads: tuple[int, int, int], num_tokens: int, num_seqs: int, taken: bool) -> None:
    assert takes(spec_of(*heads), num_tokens, num_seqs) == taken


def test_windows_and_fp8_pages_stay_with_whole_tiles() -> None:
    scale = torch.ones(1)
    assert takes(spec_of(*QWEN), 16, 1)
    assert not takes(spec_of(*QWEN, window=300), 16, 1)
    assert not takes(spec_of(*QWEN, scales=Scales(scale, scale, ScaleKind.PER_TENSOR)), 16, 1)


@pytest.mark.parametrize("group", [1, 4, 8, 64])
def test_no_lengths_make_more_tiles_than_there_is_room_for(group: int) -> None:
    queries = 128 // group
    for num_seqs in range(1, 6):
        for num_tokens in (*range(1, 12), 16, 17, 31, 32, 33, 64, 128):
            if takes(spec_of(group, 1, 128), num_tokens, num_seqs):
                for first in range(num_tokens + 1):
                    new = [first, *[1] * (num_seqs - 2), num_tokens - first - max(num_seqs - 2, 0)][:num_seqs]
                    if min(new) >= 0 and sum(new) <= num_tokens:
                        count = sum(-(-some // queries) for some in new)
                        halves = 2 if max(new) > queries // 2 else 1
                        assert count * halves <= MOST_ROW_TILES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "lengths",
    [[(4096, 16)], [(4096, 8)], [(0, 1)], [(127, 1)], [(128, 1)], [(4096, 9), (70, 2)], [(0, 0), (70, 0)], [(3, 130)]],
    ids=str,
)
def test_tiles_are_measured(lengths: list[tuple[int, int]], device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    queries, keys = 16, 128
    listed = tiles(lengths, queries, keys)
    records = torch.tensor([[*row, 0, 0, 0] for row in [*listed, (9, 9, 9, 99, 99)]], dtype=torch.int32, device=device)
    count = torch.tensor([len(listed)], dtype=torch.int32, device=device)
    extent = torch.full((3,), -1, dtype=torch.int32, device=device)
    launch(records, count, extent, queries // 2)
    halves = 2 if any(first + queries // 2 < new for _, first, _, new, _ in listed) else 1
    most = max((-(-min(kv, kv - new + first + queries) // keys) for _, first, _, new, kv in listed), default=0)
    assert extent.tolist() == [len(listed), halves, most]
