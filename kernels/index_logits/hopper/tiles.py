"""index_logits in Gluon for Hopper, for prompts: keys stay in registers while their sequence's queries pass by.

    producer     the next block of keys, box by box; the queries of its rows, one after the other, in a ring
    consumers    KEYS keys each: a product with the heads of a query, relu, weights, sum over heads, store; while one
                 adds up, the tensor cores are another's

A program takes items of a block of keys and a tile of rows; an item has a run for each sequence among its rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import make_barriers
from kernels.hopper.registers import opaque
from kernels.hopper.work_queue import publish, take

# Consumers; 64 keys in 32 registers of a thread leave room for four of them.
PARTS = gl.constexpr(4)


@gluon.jit
def stream(
    q_desc, k_desc, tables_ptr, sequences_ptr, num_keys_ptr, num_rows, max_keys, least_keys, stride_tables_seq,
    page_rows, keys, queries, bars, work,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Finds this program's runs, publishes them and streams their keys and queries."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BLOCK: gl.constexpr = KEYS * PARTS
    BOX: gl.constexpr = PAGE if PAGE < KEYS else KEYS
    BOXES: gl.constexpr = BLOCK // BOX
    keys_full, keys_empty, q_full, q_empty = bars
    lane = gl.arange(0, 32, LANES)
    blocks = (max_keys + BLOCK - 1) // BLOCK
    step = 0
    turn = 0
    tiles = (num_rows + ROWS - 1) // ROWS
    for item in range(gl.program_id(0), blocks * tiles, gl.num_programs(0)):
        # Prompts see few of the last blocks: turned by a tile's number, each program has some of all.
        first = (item + item // blocks) % blocks * BLOCK
        row = (tiles - 1 - item // blocks) * ROWS
        stop = gl.minimum(row + ROWS, num_rows)
        needed = gl.maximum(first, least_keys)
        tile_row = row + gl.arange(0, ROWS if ROWS > 32 else 32, LANES)
        sequences = gl.load(sequences_ptr + tile_row, mask=tile_row < stop, other=-2)
        seen = gl.minimum(gl.load(num_keys_ptr + tile_row, mask=tile_row < stop, other=0), max_keys)
        while row < stop:
            sequence = gl.max(gl.where(tile_row == row, sequences, -2), 0)
            of_run = (sequences == sequence) & (tile_row >= row)
            end = row + gl.sum(of_run.to(gl.int32), 0)
            # Rows of a run see more and more keys.
            begin = end - gl.sum((of_run & (seen > needed)).to(gl.int32), 0)
            if begin < end:
                begin_1 = end - gl.sum((of_run & (seen > gl.maximum(first + KEYS, least_keys))).to(gl.int32), 0)
                begin_2 = end - gl.sum((of_run & (seen > gl.maximum(first + 2 * KEYS, least_keys))).to(gl.int32), 0)
                begin_3 = end - gl.sum((of_run & (seen > gl.maximum(first + 3 * KEYS, least_keys))).to(gl.int32), 0)
                publish(work[0], work[1], work[2], turn, (begin, end, first, begin, begin_1, begin_2, begin_3))
                last = gl.max(gl.where(of_run, seen, 0), 0) - 1
                place = tables_ptr + sequence.to(gl.int64) * stride_tables_seq
                pages = gl.load(place + gl.minimum(first + lane * BOX, last) // PAGE)
                mbarrier.wait(keys_empty.index(0), (turn & 1) ^ 1)
                mbarrier.expect(keys_full.index(0), BLOCK * DIM * 2)
                for box in gl.static_range(BOXES):
                    page = gl.sum(gl.where(lane == box, pages, 0), 0)
                    target = keys.index(box * BOX // KEYS).slice(box * BOX % KEYS, BOX, 0)
                    at = page * page_rows + (first + box * BOX) % PAGE
                    tma.async_copy_global_to_shared(k_desc, [at, 0], keys_full.index(0), target)
                for token in range(begin, end):
                    s = step % STAGES
                    mbarrier.wait(q_empty.index(s), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(q_full.index(s), HEADS * DIM * 2)
                    tma.async_copy_global_to_shared(q_desc, [token, 0, 0], q_full.index(s), queries.index(s))
                    step += 1
                turn += 1
            row = end
    publish(work[0], work[1], work[2], turn, (-1, 0, 0, 0, 0, 0, 0))


@gluon.jit
def score(
    weights_ptr, num_keys_ptr, out_ptr, max_keys, stride_weights_token, keys, queries, bars, work,
    PART: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: KEYS keys of each run's block."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 16])
    HELD: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    keys_full, keys_empty, q_full, q_empty = bars
    zeros = gl.zeros([KEYS, HEADS], gl.float32, L)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, L))
    # Opaque: the compiler would work it out for all partitions at once, before they have their registers, and spill.
    place = opaque(PART * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L)))
    step = 0
    turn = 0
    begin, end, first, begin_0, begin_1, begin_2, begin_3 = take(work[0], work[1], work[2], turn)
    while begin >= 0:
        # Rows before this one see none of this consumer's keys.
        own = (begin_0, begin_1, begin_2, begin_3)[PART]
        mbarrier.wait(keys_full.index(0), turn & 1)
        held = keys.index(PART).load(HELD)
        key = first + place
        for _ in range(begin, own):
            s = step % STAGES
            mbarrier.wait(q_full.index(s), (step // STAGES) & 1)
            mbarrier.arrive(q_empty.index(s), count=1)
            step += 1
        if own == end:
            mbarrier.arrive(keys_empty.index(0), count=1)
        for token in range(own, end):
            s = step % STAGES
            row = token.to(gl.int64)
            # On their way while the product is made.
            weight = gl.load(weights_ptr + row * stride_weights_token + head)
            count = gl.minimum(gl.load(num_keys_ptr + row), max_keys)
            mbarrier.wait(q_full.index(s), (step // STAGES) & 1)
            scores = warpgroup_mma(held, queries.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(q_empty.index(s), count=1)
            if token == own:
                # Only a product that took the keys proves that they have come out of shared memory.
                mbarrier.arrive(keys_empty.index(0), count=1)
            logits = gl.sum(gl.maximum(scores, 0.0) * weight[None, :], 1)
            gl.store(out_ptr + row * max_keys + key, logits, mask=key < count)
            step += 1
        turn += 1
        begin, end, first, begin_0, begin_1, begin_2, begin_3 = take(work[0], work[1], work[2], turn)


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@gluon.jit(
    do_not_specialize=["num_rows", "max_keys", "least_keys", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def score_tiles(
    q_desc, k_desc, weights_ptr, tables_ptr, sequences_ptr, num_keys_ptr, out_ptr, num_rows, max_keys, least_keys,
    stride_weights_token, stride_tables_seq, page_rows,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    DTYPE: gl.constexpr = q_desc.dtype
    keys = gl.allocate_shared_memory(DTYPE, [PARTS, KEYS, DIM], TILES)
    arriving = gl.allocate_shared_memory(DTYPE, [STAGES, 1, HEADS, DIM], q_desc.layout)
    queries = arriving._reinterpret(DTYPE, [STAGES, HEADS, DIM], TILES)
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work = (queue, make_barriers(2, 1), make_barriers(2, PARTS))
    bars = (make_barriers(1, 1), make_barriers(1, PARTS), make_barriers(STAGES, 1), make_barriers(STAGES, PARTS))
    # One expression: what passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (score, (
                weights_ptr, num_keys_ptr, out_ptr, max_keys, stride_weights_token, keys, queries, bars, work,
                gl.constexpr(role), HEADS, KEYS, STAGES,
            ))
            if role < 4
            else (stream, (
                q_desc, k_desc, tables_ptr, sequences_ptr, num_keys_ptr, num_rows, max_keys, least_keys,
                stride_tables_seq, page_rows, keys, arriving, bars, work, HEADS, DIM, PAGE, ROWS, KEYS, STAGES,
            ))
            for role in (0, 1, 2, 3, 4)
        ],
        [4, 4, 4, 1],
        [104, 104, 104, 56],
    )  # fmt: skip
