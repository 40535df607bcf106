"""index_logits in Gluon for Hopper, for prompts over 16-bit keys: keys stay in shared memory while queries pass by.

    producer     queries of two rows with their heads' weights, to two places in turn; the next block of keys, 64 of
                 them as soon as the last product of those that lay there is made
    consumers    every second 64 keys each (`wide_scores`)

Queries are read once for each block, from the L2 cache: a block of 512 keys reads half of what one of 256 in registers
does. Items of a block of keys and a tile of rows are those of `tiles`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.barriers import make_barriers
from kernels.hopper.work_queue import publish
from kernels.index_logits.hopper.tile_items import item_of, number_of_items, rows_behind, run_from
from kernels.index_logits.hopper.wide_scores import CONSUMERS, KEYS, PAIRS, score


@gluon.jit
def stream(
    q_desc, k_desc, weights_desc, tables_ptr, sequences_ptr, num_keys_ptr, num_rows, max_keys, least_keys,
    stride_weights_token, stride_tables_seq, page_rows, keys, queries, weights, bars, work,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Finds this program's runs, publishes them and streams their keys and queries."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BOX: gl.constexpr = PAGE if PAGE < KEYS else KEYS
    OF_KEYS: gl.constexpr = KEYS // BOX
    BYTES: gl.constexpr = DIM * 2
    PLACES: gl.constexpr = ((BLOCK // BOX + 31) // 32) * 32
    keys_full, keys_empty, q_full, q_empty = bars
    lane = gl.arange(0, PLACES, LANES)
    blocks = (max_keys + BLOCK - 1) // BLOCK
    tiles = (num_rows + ROWS - 1) // ROWS
    step = 0
    turn = 0
    for number in range(gl.program_id(0), number_of_items(blocks, tiles), gl.num_programs(0)):
        block, tile = item_of(number, blocks, tiles, ROWS, BLOCK)
        first = block * BLOCK
        row = tile * ROWS
        stop = gl.where(block < 0, row, gl.minimum(row + ROWS, num_rows))
        tile_row = row + gl.arange(0, ROWS if ROWS > 32 else 32, LANES)
        sequences = gl.load(sequences_ptr + tile_row, mask=tile_row < stop, other=-2)
        seen = gl.minimum(gl.load(num_keys_ptr + tile_row, mask=tile_row < stop, other=0), max_keys)
        while row < stop:
            sequence, of_run, end = run_from(row, tile_row, sequences)
            begin = end - rows_behind(first, of_run, seen, least_keys)
            if begin < end:
                begin_1 = end - rows_behind(first + KEYS, of_run, seen, least_keys)
                publish(work[0], work[1], work[2], turn, (begin, end, first, begin, begin_1, 0, 0))
                last = gl.max(gl.where(of_run, seen, 0), 0) - 1
                place = tables_ptr + sequence.to(gl.int64) * stride_tables_seq
                pages = gl.load(place + gl.minimum(first + lane * BOX, last) // PAGE)
                for token in range(begin, end, 2):
                    s = step % PAIRS
                    full = q_full.index(s)
                    mbarrier.wait(q_empty.index(s), ((step // PAIRS) & 1) ^ 1)
                    mbarrier.expect(full, 2 * HEADS * (BYTES + 4))
                    tma.async_copy_global_to_shared(q_desc, [token, 0, 0], full, queries.index(s))
                    for i in gl.static_range(2):
                        at = (token + i) * stride_weights_token
                        tma.async_copy_global_to_shared(weights_desc, [at], full, weights.index(s * 2 + i))
                    step += 1
                    if token == begin:
                        # Behind the first queries, which need not wait until keys are done with.
                        for some in gl.static_range(BLOCK // KEYS):
                            mbarrier.wait(keys_empty.index(some), (turn & 1) ^ 1)
                            mbarrier.expect(keys_full.index(some), KEYS * BYTES)
                            for box in gl.static_range(OF_KEYS):
                                page = gl.sum(gl.where(lane == some * OF_KEYS + box, pages, 0), 0)
                                at = page * page_rows + (first + some * KEYS + box * BOX) % PAGE
                                target = keys.index(some).slice(box * BOX, BOX, 0)
                                tma.async_copy_global_to_shared(k_desc, [at, 0], keys_full.index(some), target)
                turn += 1
            row = end
    publish(work[0], work[1], work[2], turn, (-1, 0, 0, 0, 0, 0, 0))


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@gluon.jit(
    do_not_specialize=["num_rows", "max_keys", "least_keys", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def score_wide(
    q_desc, k_desc, weights_desc, tables_ptr, sequences_ptr, num_keys_ptr, out_ptr, num_rows, max_keys,
    least_keys, stride_weights_token, stride_tables_seq, page_rows,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, rank=2)
    keys = gl.allocate_shared_memory(DTYPE, [BLOCK // KEYS, KEYS, DIM], TILES)
    arriving = gl.allocate_shared_memory(DTYPE, [PAIRS, 2, HEADS, DIM], q_desc.layout)
    queries = arriving._reinterpret(DTYPE, [PAIRS, 2 * HEADS, DIM], TILES)
    weights = gl.allocate_shared_memory(gl.float32, [2 * PAIRS, HEADS], weights_desc.layout)
    weights_of = weights._reinterpret(gl.float32, [PAIRS, 2 * HEADS], weights_desc.layout)
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work = (queue, make_barriers(2, 1), make_barriers(2, CONSUMERS))
    bars = (
        make_barriers(BLOCK // KEYS, 1), make_barriers(BLOCK // KEYS, 1), make_barriers(PAIRS, 1),
        make_barriers(PAIRS, CONSUMERS),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (score, (
                num_keys_ptr, out_ptr, max_keys, keys, queries, weights_of, bars, work, gl.constexpr(0), HEADS, BLOCK,
            )),
            (score, (
                num_keys_ptr, out_ptr, max_keys, keys, queries, weights_of, bars, work, gl.constexpr(1), HEADS, BLOCK,
            )),
            (stream, (
                q_desc, k_desc, weights_desc, tables_ptr, sequences_ptr, num_keys_ptr, num_rows, max_keys, least_keys,
                stride_weights_token, stride_tables_seq, page_rows, keys, arriving, weights, bars, work, HEADS, DIM,
                PAGE, ROWS, BLOCK,
            )),
        ],
        [4, 1],
        [216, 72],
    )  # fmt: skip
