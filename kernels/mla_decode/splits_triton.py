"""A plan of mla_decode that cuts by load, in Triton: every program gets one run of tiles, as long as every other's.

Units, the tiles of rows of all sequences, lie one behind the other; each is as long as its tiles of latents and EXTRA
for what begins and ends it. Cuts are at multiples of `share`. Units of about one length are all cut into as many parts,
each a run: fewer parts, and no program has two.

    units      | 0 ............ | 1 .... | 2 ..... | 3 .... |
    programs   | 0       | 1        | 2        | 3          |      unit 0 is cut once, 2 once; 1 and 3 are not

Where heads are few and no unit has many parts, the program that has a unit's first part merges the others.
"""

import torch
import triton
import triton.language as tl

from kernels.mla_decode import cut_sizes

# Latents of a tile; tiles that starting and ending a unit costs, and where heads are few. With 2 in place of 4, 16
# sequences of 1 to 8,192 latents with 64 heads take 44.8 us for 42.3 (H200).
TILE, EXTRA, EXTRA_OF_FEW = 64, 4, 3
# Tiles that a program gets at least.
LEAST_RUN = 2
# A run that is longer by this part, and cuts nothing, is as good: partial results cost writing and folding.
SLACK = 16


@triton.jit
def share_of(tiles, size, programs, least_run, EXTRA: tl.constexpr, SLACK: tl.constexpr):
    """Returns the length of a program's run, and how far behind a unit's begin the next one of its sequence begins."""
    total = tl.sum(tiles * (size + EXTRA), 0)
    share = tl.maximum(tl.cdiv(total, programs), least_run)
    longest = tl.max(tl.where(tiles > 0, size + EXTRA, 1), 0)
    whole = tl.cdiv(share, longest) * longest
    is_whole = whole <= share + share // SLACK
    even = tl.maximum(tl.cdiv(longest - EXTRA, tl.maximum(programs // tl.maximum(tl.sum(tiles, 0), 1), 1)), least_run)
    parts = tl.cdiv(longest - EXTRA, even)
    is_even = (even <= share + share // SLACK) & (parts > 1) & (is_whole == 0)
    return tl.where(is_whole, whole, tl.where(is_even, even, share)), tl.where(is_even, even * parts, size + EXTRA)


@triton.jit
def cuts_of(at, size, share):
    """Returns which program a unit's first part belongs to, and in how many places the unit is cut."""
    owner = at // share
    return owner, (at + size - 1) // share - owner


@triton.jit(do_not_specialize=["num_seqs", "least_run", "many_parts", "most_merged", "longer"])
def list_runs(
    items_ptr,
    counts_ptr,
    shared_ptr,
    firsts_ptr,
    lengths_ptr,
    cu_q_ptr,
    num_seqs,
    programs,
    least_run,
    many_parts,
    most_merged,
    longer,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    EXTRA: tl.constexpr,
    SLACK: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_ROWS: tl.constexpr,
    MULTI: tl.constexpr,
    FEW: tl.constexpr,
    SEQS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program i lists sequence i's items; those behind num_seqs say where each program's items begin."""
    seqs = tl.arange(0, SEQS)
    ok = seqs < num_seqs
    length = tl.load(lengths_ptr + seqs, mask=ok, other=0)
    if MULTI:
        q_start = tl.load(cu_q_ptr + seqs, mask=ok, other=0)
        q_len = tl.load(cu_q_ptr + seqs + 1, mask=ok, other=0) - q_start
    else:
        q_start = seqs
        q_len = tl.where(ok, 1, 0)
    tiles = (q_len * HEADS + ROWS - 1) // ROWS
    size = tl.maximum((length + TILE - 1) // TILE, 1)
    share, pitch = share_of(tiles, size, programs, least_run, EXTRA, SLACK)
    begins = tl.cumsum(tiles * pitch, 0) - tiles * pitch
    most = tl.max(tiles, 0)
    merges = False
    if FEW:  # one tile each
        _, all_cuts = cuts_of(begins, size, share)
        merges = tl.max(tl.where(tiles > 0, all_cuts, 0), 0) < most_merged
    mine = tl.program_id(0)
    if mine >= num_seqs:
        program = mine - num_seqs
        first = tl.zeros([SEQS], tl.int32)
        for tile in range(most):
            owner, cuts = cuts_of(begins + tile * pitch, size, share)
            first += tl.where(tile < tiles, tl.minimum(tl.maximum(program - owner, 0), cuts + 1), 0)
        tl.store(firsts_ptr + program, tl.sum(first, 0))
    else:
        item_base = tl.zeros([SEQS], tl.int32)
        slot_base = tl.zeros([SEQS], tl.int32)
        unit_base = tl.zeros([SEQS], tl.int32)
        for tile in range(most):
            _, cuts = cuts_of(begins + tile * pitch, size, share)
            there = tile < tiles
            item_base += tl.where(there, cuts + 1, 0)
            slot_base += tl.where(there & (cuts > 0), cuts + 1, 0)
            unit_base += tl.where(there & (cuts > 0) & (merges == 0), tl.where(cuts + 1 >= many_parts, PIECES, 1), 0)
        if mine == 0:
            tl.store(counts_ptr, tl.sum(item_base, 0))
            tl.store(counts_ptr + 1, share)
            tl.store(counts_ptr + 2, tl.sum(unit_base, 0))
        before = seqs < mine
        item = tl.sum(tl.where(before, item_base, 0), 0)
        slot = tl.sum(tl.where(before, slot_base, 0), 0)
        unit = tl.sum(tl.where(before, unit_base, 0), 0)
        own = seqs == mine
        own_begin = tl.sum(tl.where(own, begins, 0), 0)
        own_size = tl.sum(tl.where(own, size, 0), 0)
        own_pitch = tl.sum(tl.where(own, pitch, 0), 0)
        own_length = tl.sum(tl.where(own, length, 0), 0)
        own_start = tl.sum(tl.where(own, q_start, 0), 0)
        own_queries = tl.sum(tl.where(own, q_len, 0), 0)
        for tile in range(tl.sum(tl.where(own, tiles, 0), 0)):
            at = own_begin + tile * own_pitch
            owner, cuts = cuts_of(at, own_size, share)
            is_merged = merges & (cuts > 0)
            later = tl.where(is_merged & (at + own_size - (owner + cuts) * share > longer), longer, 0)
            for first in range(0, cuts + 1, STEP):
                part = first + tl.arange(0, STEP)
                inside = part <= cuts
                begin = tl.where(part == 0, 0, (owner + part) * share - at + later) * TILE
                stop = tl.where(part == cuts, own_length, ((owner + part + 1) * share - at + later) * TILE)
                to = items_ptr + (item + part) * 8
                zero = tl.zeros([STEP], tl.int32)
                tl.store(to, zero + mine, mask=inside)
                tl.store(to + 1, zero + own_start, mask=inside)
                if FEW:
                    tl.store(to + 2, tl.where(is_merged, tl.where(part == 0, cuts, -1), 0), mask=inside)
                    tl.store(to + 3, part, mask=inside)
                else:
                    tl.store(to + 2, zero + own_queries, mask=inside)
                    tl.store(to + 3, zero + tile, mask=inside)
                tl.store(to + 4, begin, mask=inside)
                tl.store(to + 5, stop, mask=inside)
                tl.store(to + 6, zero + own_length, mask=inside)
                tl.store(to + 7, tl.where(cuts > 0, slot + part, -1), mask=inside)
            if (cuts > 0) & (merges == 0):
                rows = tl.minimum(own_queries * HEADS - tile * ROWS, ROWS)
                pieces = tl.where(cuts + 1 >= many_parts, PIECES, 1)
                for piece in range(pieces):
                    row = piece * PIECE_ROWS
                    to = shared_ptr + (unit + piece) * 4
                    tl.store(to, own_start * HEADS + tile * ROWS + row)
                    tl.store(to + 1, tl.where(pieces > 1, tl.minimum(rows - row, PIECE_ROWS), rows))
                    tl.store(to + 2, cuts + 1)
                    tl.store(to + 3, slot * SLOT_ROWS + row)
                unit += pieces
            if cuts > 0:
                slot += cuts + 1
            item += cuts + 1


def launch(
    lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    *,
    programs: int,
    heads: int,
    rows: int,
    slot_rows: int,
    many_parts: int,
    most_merged: int,
) -> None:
    """Launches over checked arguments. `lists` are the plan's items, counts, shared and firsts, which it fills."""
    num_seqs = seqlens_k.shape[0]
    if num_seqs == 0:
        return
    with torch.cuda.device_of(seqlens_k):
        list_runs[(num_seqs + programs + 1,)](
            *lists,
            seqlens_k,
            cu_seqlens_q if cu_seqlens_q is not None else seqlens_k,
            num_seqs,
            programs,
            LEAST_RUN,
            many_parts,
            most_merged,
            cut_sizes.LONGER,
            HEADS=heads,
            TILE=TILE,
            EXTRA=EXTRA if rows == cut_sizes.MANY_ROWS else EXTRA_OF_FEW,
            SLACK=SLACK,
            ROWS=rows,
            SLOT_ROWS=slot_rows,
            PIECES=cut_sizes.PIECES,
            PIECE_ROWS=-(-slot_rows // cut_sizes.ROW_BLOCK) * cut_sizes.PIECE_BLOCK,
            MULTI=cu_seqlens_q is not None,
            FEW=rows < cut_sizes.MANY_ROWS,
            SEQS=max(triton.next_power_of_2(num_seqs), 16),
            STEP=64,
            num_warps=4,
        )
