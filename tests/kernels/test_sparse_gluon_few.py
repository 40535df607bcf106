"""sparse_latent_attention for few rows on a Hopper GPU: the bits of the kernel for many rows, whatever the launch."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import is_hopper
from kernels.graph_capture import graph_capture
from kernels.key_rows import KeyRows
from kernels.sparse_latent_attention.call import SparseLatentCall
from tests.device_waits import no_device_waits
from tests.kernels.compare import assert_same_bits

WIDTH, LATENT, SCALE = 576, 512, 0.07
LENGTH, PAGE = 5120, 16
NUM_KEYS = ([0], [1], [63], [64], [65], [1023], [1024], [1025], [2048], [5000])
MIXED = ([65, 0, 3000], [2048, 1024, 0, 1, 1500, 5000, 129, 1025])


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def make_call(num_keys: list[int], heads: int, k: int, seed: int = 0) -> SparseLatentCall:
    """A query of each of some sequences in permuted pages. What is not chosen is NaN, positions behind the last chosen
    one are nonsense, and so is the sequence of a query without keys."""
    rng = torch.Generator().manual_seed(seed)
    tokens, count = len(num_keys), LENGTH // PAGE
    pages = torch.full((tokens * count, PAGE, WIDTH), float("nan"), dtype=torch.bfloat16, device="cuda")
    tables = torch.randperm(tokens * count, generator=rng).int().view(tokens, count)
    chosen = torch.full((tokens, k), 1 << 30, dtype=torch.int32)
    for token, seen in enumerate(num_keys):
        some = torch.randperm(seen, generator=rng)[:k].sort().values
        chosen[token, : len(some)] = some.int()
        made = torch.randn(len(some), WIDTH, generator=rng).bfloat16()
        pages[tables[token].long()[some // PAGE].cuda(), (some % PAGE).cuda()] = made.cuda()
    keys = torch.tensor(num_keys, dtype=torch.int32)
    rows = KeyRows(torch.where(keys > 0, torch.arange(tokens, dtype=torch.int32), -1).int(), keys)
    q = torch.randn(tokens, heads, WIDTH, generator=rng).bfloat16()
    wide = torch.cat((tables, torch.full((tokens, 3), -1, dtype=torch.int32)), 1)  # rows of tables are not aligned
    rows = KeyRows(*(part.cuda() for part in rows))
    return SparseLatentCall(q.cuda(), pages, wide.cuda(), rows, chosen.cuda(), SCALE, LATENT)


def many(call: SparseLatentCall) -> torch.Tensor:
    """The result of the kernel for many rows."""
    from kernels.sparse_latent_attention.hopper.launch import attend

    out = blank(call)
    attend(call, out, splits=False)
    return out


def few(call: SparseLatentCall) -> torch.Tensor:
    from kernels.sparse_latent_attention.hopper.few_launch import attend_few

    out = blank(call)
    attend_few(call, out)
    return out


def blank(call: SparseLatentCall) -> torch.Tensor:
    return torch.full((*call.q.shape[:2], LATENT), float("nan"), dtype=call.q.dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "k"), [(128, 2048), (16, 2048), (1, 64), (64, 65), (65, 1000), (128, 3000)])
def test_few_rows_have_the_bits_of_many(heads: int, k: int) -> None:
    for num_keys in (*NUM_KEYS, *MIXED):
        call = make_call(num_keys, heads, k)
        wanted = many(call)
        assert_same_bits(few(call), wanted)
        assert not wanted[call.rows.num_keys == 0].any() and wanted.isfinite().all()


@pytest.mark.gpu
def test_a_captured_launch_serves_other_rows() -> None:
    """Of any number of keys, none too, without a wait; counters of one replay do not disturb the next."""
    call = make_call([3000, 0, 70], 128, 2048)
    out = few(call)
    with no_device_waits():
        few(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out.copy_(few(call))
    for seed, num_keys in enumerate(([3000, 0, 70], [1, 2048, 0], [5000, 1025, 64], [0, 0, 1030], [2047, 2048, 2049])):
        other = make_call(num_keys, 128, 2048, seed)
        for name in ("q", "pages", "block_tables", "chosen"):
            getattr(call, name).copy_(getattr(other, name))
        for mine, new in zip(call.rows, other.rows, strict=True):
            mine.copy_(new)
        wanted = many(call)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert_same_bits(out, wanted)


@pytest.mark.gpu
def test_launches_of_two_streams_do_not_meet() -> None:
    calls = [make_call([3000, 2048], 128, 2048, seed) for seed in range(2)]
    wanted = [many(call) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    got: list[list[torch.Tensor]] = [[] for _ in calls]
    for _ in range(20):
        for stream, call, outs in zip(streams, calls, got, strict=True):
            with torch.cuda.stream(stream):
                outs.append(few(call))
    torch.cuda.synchronize()
    for outs, result in zip(got, wanted, strict=True):
        for out in outs:
            assert_same_bits(out, result)
