"""The kernel for few rows: some programs make weights, the others add up values; see the package's description."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.softmax import declare_looks
from kernels.prefill_attention.hopper.few.columns import add_round
from kernels.prefill_attention.hopper.few.counters import await_count, signal
from kernels.prefill_attention.hopper.few.scores import score_round
from kernels.prefill_attention.hopper.few.tiles import KEYS, prefetch_records
from kernels.prefill_attention.hopper.few.values import MOST_PLACES
from kernels.prefill_attention.hopper.few.weights import weigh_round


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq", "q_token", "q_group", "q_head", "slots"])
def attend_few(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, tables_ptr, records_ptr, extent_ptr, peaks_ptr, decays_ptr,
    sums_ptr, weights_ptr, bases_ptr, acc_ptr, row_sum_ptr, counters_ptr, scale_log2, cap_log2, num_tokens,
    stride_tables_seq, q_token, q_group, q_head, stride_out_token, stride_out_head, k_page_rows, v_page_rows, slots,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    CAP: gl.constexpr, WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Writes the results of a plan's tiles, up to MOST_ROW_TILES of 64 rows; see `measure` for extent int32 [3]."""
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    programs = gl.num_programs(0)
    declare_looks()
    # The records are brought near while `extent` is loaded.
    prefetch_records(records_ptr)
    tiles, halves, most = gl.load(extent_ptr), gl.load(extent_ptr + 1), gl.load(extent_ptr + 2)
    sources = (
        (q_ptr, q_token, q_group, q_head), (k_ptr, k_page_rows), (v_ptr, v_page_rows), tables_ptr, stride_tables_seq,
        records_ptr,
    )  # fmt: skip
    results = (out_ptr, lse_ptr, sinks_ptr, num_tokens, stride_out_token, stride_out_head)
    if tiles > 0:
        row_tiles = HEADS * tiles * halves
        adders = gl.minimum(row_tiles * (D // ROWS), programs // 2)
        # So few tiles of scores that each program has one at most: all programs score, then the adders begin.
        all_score = row_tiles * most <= programs
        scorer = gl.program_id(0) - gl.where(all_score, 0, adders)
        scorers = programs - gl.where(all_score, 0, adders)
        width = round_width(most, gl.maximum(scorers // row_tiles, 1), slots // 2 // row_tiles)
        rounds = (tiles, halves, width, adders, scorers)
        for turn in range((most + width - 1) // width):
            # Of the two halves of the scratch one is filled while the other is read.
            odd = turn % 2 * (slots // 2 * 64)
            own = (peaks_ptr + odd, decays_ptr + odd, sums_ptr + odd, weights_ptr + odd * KEYS)
            if scorer >= 0:
                score_and_weigh(
                    sources, own, bases_ptr, counters_ptr, rounds, scorer, turn, scale_log2, cap_log2,
                    HEADS, GQA_GROUP, D, PAGE, HND, CAP, DTYPE,
                )  # fmt: skip
            if gl.program_id(0) < adders:
                add(
                    sources, own, (bases_ptr, acc_ptr, row_sum_ptr), results, counters_ptr, rounds, turn,
                    HEADS, GQA_GROUP, D, PAGE, HND, ROWS, STAGES, WANTS_LSE, HAS_SINKS, DTYPE,
                )  # fmt: skip
        # The last one sets all to 0 for the next launch.
        if gl.atomic_add(counters_ptr + 4, 1, sem="acq_rel", scope="gpu") == programs - 1:
            for i in gl.static_range(5):
                gl.store(counters_ptr + i, 0)


@gluon.jit
def add(
    sources, own, states, results, counters_ptr, rounds, turn,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """An adder's part of a round."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles, halves, width, adders, scorers = rounds
    buffers = (
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 64], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, KEYS], SHARED),
        gl.allocate_shared_memory(gl.int32, [MOST_PLACES * KEYS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [MOST_PLACES * ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [MOST_PLACES * ROWS], PLAIN),
    )
    ready = (counters_ptr + 1, (turn + 1) * scorers)
    add_round(
        sources, own, states, ready, results, buffers, gl.program_id(0), adders, tiles, halves, turn * width, width,
        turn, HEADS, GQA_GROUP, D, PAGE, HND, ROWS, STAGES, WANTS_LSE, HAS_SINKS,
    )  # fmt: skip
    # Adders without columns signal, too: the counter of a half of the scratch counts all adders of a round.
    await_count(ready[0], ready[1])
    signal(counters_ptr + 2 + turn % 2)


@gluon.jit
def score_and_weigh(
    sources, own, bases_ptr, counters_ptr, rounds, scorer, turn, scale_log2, cap_log2,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    CAP: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A scorer's part of a round."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles, halves, width, adders, scorers = rounds
    buffers = (
        gl.allocate_shared_memory(DTYPE, [64, D], SHARED),
        gl.allocate_shared_memory(DTYPE, [KEYS, D], SHARED),
    )
    last, scores = score_round(
        sources, own[0], buffers, scorer, scorers, tiles, halves, turn * width, width, cap_log2,
        HEADS, GQA_GROUP, D, PAGE, HND, CAP, SL,
    )  # fmt: skip
    signal(counters_ptr)
    await_count(counters_ptr, (turn + 1) * scorers)
    if turn > 1:
        await_count(counters_ptr + 2 + turn % 2, turn // 2 * adders)
    weigh_round(
        sources, own, bases_ptr, buffers, last, scores, scorers, tiles, turn * width, width, turn, scale_log2, cap_log2,
        HEADS, GQA_GROUP, D, PAGE, HND, CAP, SL,
    )  # fmt: skip
    signal(counters_ptr + 1)


@gluon.jit
def round_width(most, at_once, room):
    """Returns the key tiles of a round: what scorers score at once, of many rounds twice as much, all much the same."""
    width = gl.minimum(gl.where(most > 3 * at_once, 2 * at_once, at_once), room)
    rounds = (most + width - 1) // width
    return (most + rounds - 1) // rounds
