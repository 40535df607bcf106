"""What the kernels that choose tokens share: penalised scores, noise, an order of scores as integers."""

import triton
import triton.language as tl

LARGEST_BELOW_ONE: tl.constexpr = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix32(words):
    words = tl.mul(words ^ (words >> 16), 0x7FEB352D, sanitize_overflow=False)
    words = tl.mul(words ^ (words >> 15), 0x846CA68B, sanitize_overflow=False)
    return words ^ (words >> 16)


@triton.jit
def gumbel(ids, low, high):
    words = _mix32(ids.to(tl.uint32) ^ low)
    words = _mix32(tl.add(words, high, sanitize_overflow=False))
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, LARGEST_BELOW_ONE)
    # -log1p(-uniform): the quotient makes up for what the rounding of 1 - uniform lost.
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)


@triton.jit
def order_key(score):
    """int32 in the order of the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_counts(row, slots_ptr, counts_ptr, token_ids_ptr, positions_ptr, rows_ptr, V, COUNTS: tl.constexpr):
    """The row's counts, its newest token (-1: it is counted) and whether it has counts."""
    newest = tl.full((), -1, tl.int32)
    slot = tl.full((), -1, tl.int32)
    if COUNTS:
        slot = tl.load(slots_ptr + row)
        counts_ptr += tl.maximum(slot, 0).to(tl.int64) * (V + 1)
        if slot >= 0:
            at = tl.load(rows_ptr + row)
            if tl.load(counts_ptr + V) == tl.load(positions_ptr + at):
                newest = tl.load(token_ids_ptr + at)
    return counts_ptr, newest, slot >= 0


@triton.jit
def penalised(source, ids, ok, COUNTS: tl.constexpr):
    """Penalised scores of tokens, not yet divided by the temperature; -inf where there is no token."""
    logits_ptr, _, counts_ptr, newest, counted, penalties = source
    repetition, presence, frequency = penalties
    score = tl.load(logits_ptr + ids, mask=ok, other=float("-inf")).to(tl.float32)
    if COUNTS:  # noqa: SIM102
        if counted:
            count = tl.load(counts_ptr + ids, mask=ok, other=0) + 2 * (ids == newest).to(tl.int32)
            weighed = tl.where(score < 0, score * repetition, tl.math.div_rn(score, repetition))
            score = tl.where((count > 0) & ok, weighed, score)
            generated = count >> 1
            score = score - generated.to(tl.float32) * frequency
            score = score - tl.where(generated > 0, presence, 0.0)
    return score
