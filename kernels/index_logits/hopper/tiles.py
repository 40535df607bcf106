"""index_logits in Gluon for Hopper, for prompts: keys stay in registers while their sequence's queries pass by.

    producer     the next block of keys, box by box; the queries of its rows, one after the other, in a ring, with their
                 heads' weights
    consumers    some keys each; while one adds up, the tensor cores are another's

A program takes items of a block of keys and a tile of rows; an item has a run for each sequence among its rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.barriers import make_barriers, thread_barrier
from kernels.hopper.work_queue import publish
from kernels.index_logits.hopper.tile_items import item_of, number_of_items, rows_behind, run_from
from kernels.index_logits.hopper.tile_scores import score


@gluon.jit
def stream(
    q_desc, k_desc, weights_desc, scales_ptr, tables_ptr, sequences_ptr, num_keys_ptr, num_rows, max_keys, least_keys,
    stride_weights_token, stride_scales_page, stride_tables_seq, page_rows, keys, factors, queries, weights, bars, work,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, HAS_SCALES: gl.constexpr,
):  # fmt: skip
    """Finds this program's runs, publishes them and streams their keys and queries."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PART: gl.constexpr = BLOCK // PARTS
    KEYS: gl.constexpr = keys.shape[1]
    BOX: gl.constexpr = PAGE if PAGE < KEYS else KEYS
    BYTES: gl.constexpr = DIM * q_desc.dtype.primitive_bitwidth // 8
    keys_full, keys_empty, q_full, q_empty = bars
    lane = gl.arange(0, 32, LANES)
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
                begin_1 = end - rows_behind(first + PART, of_run, seen, least_keys)
                begin_2 = begin_1 if PARTS < 3 else end - rows_behind(first + 2 * PART, of_run, seen, least_keys)
                begin_3 = begin_2 if PARTS < 4 else end - rows_behind(first + 3 * PART, of_run, seen, least_keys)
                publish(work[0], work[1], work[2], turn, (begin, end, first, begin, begin_1, begin_2, begin_3))
                last = gl.max(gl.where(of_run, seen, 0), 0) - 1
                place = tables_ptr + sequence.to(gl.int64) * stride_tables_seq
                pages = gl.load(place + gl.minimum(first + lane * BOX, last) // PAGE)
                if HAS_SCALES:
                    key = gl.minimum(first + gl.arange(0, factors.shape[0], LANES), last)
                    page = gl.load(place + key // PAGE).to(gl.int64)
                    factor = gl.load(scales_ptr + page * stride_scales_page + key % PAGE)
                mbarrier.wait(keys_empty.index(0), (turn & 1) ^ 1)
                mbarrier.expect(keys_full.index(0), BLOCK * BYTES)
                for box in gl.static_range(BLOCK // BOX):
                    page = gl.sum(gl.where(lane == box, pages, 0), 0)
                    target = keys.index(box * BOX // KEYS).slice(box * BOX % KEYS, BOX, 0)
                    at = page * page_rows + (first + box * BOX) % PAGE
                    tma.async_copy_global_to_shared(k_desc, [at, 0], keys_full.index(0), target)
                if HAS_SCALES:
                    factors.store(factor)
                    thread_barrier()
                    mbarrier.arrive(keys_full.index(0), count=1)
                for token in range(begin, end):
                    s = step % STAGES
                    full = q_full.index(s)
                    mbarrier.wait(q_empty.index(s), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(full, HEADS * (BYTES + 4))
                    tma.async_copy_global_to_shared(q_desc, [token, 0, 0], full, queries.index(s))
                    at = token * stride_weights_token
                    tma.async_copy_global_to_shared(weights_desc, [at], full, weights.index(s))
                    step += 1
                turn += 1
            row = end
    publish(work[0], work[1], work[2], turn, (-1, 0, 0, 0, 0, 0, 0))


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@gluon.jit(
    do_not_specialize=["num_rows", "max_keys", "least_keys", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def score_tiles(
    q_desc, k_desc, weights_desc, scales_ptr, tables_ptr, sequences_ptr, num_keys_ptr, out_ptr, num_rows, max_keys,
    least_keys, stride_weights_token, stride_scales_page, stride_tables_seq, page_rows,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    KEYS: gl.constexpr, PRODUCTS: gl.constexpr, CHAINED: gl.constexpr, STAGES: gl.constexpr, HAS_SCALES: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, rank=2)
    BLOCK: gl.constexpr = PARTS * PRODUCTS * KEYS
    keys = gl.allocate_shared_memory(DTYPE, [PARTS * PRODUCTS, KEYS, DIM], TILES)
    arriving = gl.allocate_shared_memory(DTYPE, [STAGES, 1, HEADS, DIM], q_desc.layout)
    queries = arriving._reinterpret(DTYPE, [STAGES, HEADS, DIM], TILES)
    weights = gl.allocate_shared_memory(gl.float32, [STAGES, HEADS], weights_desc.layout)
    # The keys' scales; a power of two of them can be written at once.
    ROUND: gl.constexpr = BLOCK if PARTS != 3 else BLOCK // 3 * 4
    factors = gl.allocate_shared_memory(gl.float32, [ROUND], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work = (queue, make_barriers(2, 1), make_barriers(2, PARTS))
    keys_full = make_barriers(1, 1 + HAS_SCALES)
    bars = (keys_full, make_barriers(1, PARTS), make_barriers(STAGES, 1), make_barriers(STAGES, PARTS))
    # One expression: what passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (score, (
                num_keys_ptr, out_ptr, max_keys, keys, factors, queries, weights, bars, work, gl.constexpr(role),
                HEADS, KEYS, PRODUCTS, CHAINED, STAGES, HAS_SCALES,
            ))
            if role < PARTS
            else (stream, (
                q_desc, k_desc, weights_desc, scales_ptr, tables_ptr, sequences_ptr, num_keys_ptr, num_rows, max_keys,
                least_keys, stride_weights_token, stride_scales_page, stride_tables_seq, page_rows, keys, factors,
                arriving, weights, bars, work, HEADS, DIM, PAGE, ROWS, BLOCK, PARTS, STAGES, HAS_SCALES,
            ))
            for role in ((0, 1, 2) if PARTS == 2 else (0, 1, 2, 3) if PARTS == 3 else (0, 1, 2, 3, 4))
        ],
        [4, 1] if PARTS == 2 else [4, 4, 1] if PARTS == 3 else [4, 4, 4, 1],
        [216, 72] if PARTS == 2 else [144, 144, 80] if PARTS == 3 else [104, 104, 104, 64],
    )  # fmt: skip
