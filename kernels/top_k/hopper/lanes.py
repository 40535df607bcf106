"""What top_k's Gluon kernels are made of: tiles whose warps hold ranges of a row in order, and counts by ballots.

A tile is [SLOTS, 32 * WARPS], one column for a thread: warp w has SLOTS * 32 successive elements, 32 of them in a slot.
So what comes before an element in its warp is counted by a ballot for each slot, and only warps' totals go through
shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def lanes_of_tile(SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Returns for each thread [32 * WARPS] its warp and lane, and the slots [SLOTS, 1]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([SLOTS, 1], [1, 32], [1, WARPS], [1, 0])
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(0, LAYOUT))
    return thread // 32, thread % 32, gl.arange(0, SLOTS, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def ballot(flags):
    """Returns for each element the lanes of its slot whose flag is set, as bits."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        "=r,r", [flags.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ones(bits):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def leading_bit(number):
    """Returns the place of the highest bit that is set; -1 of 0."""
    return gl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def places(flags, lane):
    """Returns how many flags are set before each element in its warp, and in its whole warp [32 * WARPS]."""
    voted = ballot(flags)
    counts = ones(voted)
    before = gl.associative_scan(counts, 0, add) - counts
    return before + ones(voted & ((1 << lane) - 1)[None, :]), gl.sum(counts, 0)


@gluon.jit
def write_warp_sums(value, scratch, WARPS: gl.constexpr):
    """Stores the sum of int32 [32 * WARPS] over the threads of each warp."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    scratch.store(gl.sum(gl.convert_layout(value, THREADS).reshape([WARPS, 32]), 1))


@gluon.jit
def scratch_of_warps(WARPS: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def scratch_of_lanes(WARPS: gl.constexpr):
    """Returns room for a number of each of up to 32 warps; those of other ones are 0."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    scratch = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scratch.store(gl.zeros([32], gl.int32, LANES))
    return scratch


@gluon.jit
def read_warp_sums(scratch, WARPS: gl.constexpr):
    """Returns what write_warp_sums stored, [WARPS], all of it in each thread."""
    BY_WARP: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    return scratch.load(gl.SliceLayout(1, BY_WARP))


@gluon.jit
def before_warp(total, lane, WARPS: gl.constexpr):
    """Returns sums of what is the same number for all threads of a warp: over the warps before a thread's own, and
    over all of them."""
    BY_WARP: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    scratch = scratch_of_warps(WARPS)
    write_warp_sums(gl.where(lane == 0, total, 0), scratch, WARPS)
    sums = read_warp_sums(scratch, WARPS)
    own = gl.arange(0, 32 * WARPS, gl.SliceLayout(0, BY_WARP))[None, :] // 32
    number = gl.arange(0, WARPS, gl.SliceLayout(1, BY_WARP))[:, None]
    before = gl.sum(gl.where(number < own, sums[:, None], 0), 0)
    return gl.convert_layout(before, total.type.layout), gl.sum(sums, 0)


@gluon.jit
def ordered(logits):
    """uint32 in the order of fp32 numbers, none of them 0."""
    plain = gl.where(logits == logits, logits, float("-inf")) + 0.0
    bits = plain.to(gl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(gl.uint32, bitcast=True)


@gluon.jit
def counts_reaching(key, first, step, pairs, thirds, WARPS: gl.constexpr):
    """Returns how many of the keys, fewer than 2^16, reach first + step, first + 2 step and first + 3 step."""
    pair = gl.where(key >= first + step, 1, 0) + gl.where(key >= first + 2 * step, 65536, 0)
    write_warp_sums(gl.sum(pair, 0), pairs.slice(0, WARPS, 0), WARPS)
    write_warp_sums(gl.sum((key >= first + 3 * step).to(gl.int32), 0), thirds.slice(0, WARPS, 0), WARPS)
    # Each warp adds up all warps' sums, one for a lane: half as many barriers.
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pair = gl.sum(pairs.load(LANES), 0)
    third = gl.sum(thirds.load(LANES), 0)
    return pair & 65535, pair >> 16, third


@gluon.jit
def kth_largest(key, valid, k, threshold, bit, LEAST_BIT: gl.constexpr, WARPS: gl.constexpr):
    """Returns the largest number that at least k of the keys reach, of these one with few bits set.

    `valid` keys reach `threshold`, whose bits from `bit` on, an odd one, are decided; bits below LEAST_BIT, an even
    one, stay 0.
    """
    # What one step writes the step after the next one writes again: a barrier for each step, not two.
    pairs, thirds, other_pairs, other_thirds = (
        scratch_of_lanes(WARPS), scratch_of_lanes(WARPS), scratch_of_lanes(WARPS), scratch_of_lanes(WARPS)
    )  # fmt: skip
    reached = valid
    while (bit > LEAST_BIT) & (reached != k):
        threshold, reached = narrowed(key, k, threshold, reached, bit, pairs, thirds, WARPS)
        # Behind the last bit this step finds nothing, as no larger number is reached by as many.
        threshold, reached = narrowed(key, k, threshold, reached, bit - 2, other_pairs, other_thirds, WARPS)
        bit -= 4
    return threshold


@gluon.jit
def narrowed(key, k, threshold, reached, bit, pairs, thirds, WARPS: gl.constexpr):
    """Returns the threshold with two more bits, from `bit` on, decided, and how many keys reach it."""
    step = gl.to_tensor(1).to(gl.uint32) << gl.maximum(bit - 1, 0).to(gl.uint32)
    one, two, three = counts_reaching(key, threshold, step, pairs, thirds, WARPS)
    reached = gl.where(three >= k, three, gl.where(two >= k, two, gl.where(one >= k, one, reached)))
    digit = (one >= k).to(gl.uint32) + (two >= k).to(gl.uint32) + (three >= k).to(gl.uint32)
    return threshold + digit * step, reached
