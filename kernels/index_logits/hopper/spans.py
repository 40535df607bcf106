"""index_logits in Gluon for Hopper, for decoding rows: a query stays in registers while its keys stream past.

producer     blocks of keys, box by box, in a ring; the query of the next span
consumers    KEYS keys of each block each
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import make_barriers

# Consumers of a program.
PARTS = gl.constexpr(2)


@gluon.jit
def span_of(item, num_keys_ptr, spans, max_keys, least_keys, SPAN: gl.constexpr):
    """(row, first key, behind the last one) of an item; none where the row sees too few."""
    token = item // spans
    first = item % spans * SPAN
    count = gl.minimum(gl.load(num_keys_ptr + token), max_keys)
    stop = gl.minimum(count, first + SPAN)
    return token, first, gl.where(count > least_keys, stop, 0)


@gluon.jit
def stream_keys(
    q_desc, k_desc, tables_ptr, sequences_ptr, num_keys_ptr, items, spans, max_keys, least_keys, stride_tables_seq,
    page_rows, keys, queries, bars,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Streams the keys of this program's spans, and the queries that they are for."""
    BLOCK: gl.constexpr = KEYS * PARTS
    BOX: gl.constexpr = PAGE if PAGE < KEYS else KEYS
    BYTES: gl.constexpr = DIM * q_desc.dtype.primitive_bitwidth // 8
    full, empty, q_full, q_empty = bars
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, first, stop = span_of(item, num_keys_ptr, spans, max_keys, least_keys, SPAN)
        if first < stop:
            table_ptr = tables_ptr + gl.load(sequences_ptr + token).to(gl.int64) * stride_tables_seq
            pages = gl.load(table_ptr + gl.minimum(first + lane * BOX, stop - 1) // PAGE)
            q = turn % 2
            mbarrier.wait(q_empty.index(q), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(q), HEADS * BYTES)
            tma.async_copy_global_to_shared(q_desc, [token, 0, 0], q_full.index(q), queries.index(q))
            for begin in range(first, stop, BLOCK):
                s = step % STAGES
                mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(s), BLOCK * BYTES)
                for box in gl.static_range(BLOCK // BOX):
                    page = gl.sum(gl.where(lane == box, pages, 0), 0)
                    target = keys.index(s * PARTS + box * BOX // KEYS).slice(box * BOX % KEYS, BOX, 0)
                    at = page * page_rows + (begin + box * BOX) % PAGE
                    tma.async_copy_global_to_shared(k_desc, [at, 0], full.index(s), target)
                pages = gl.load(table_ptr + gl.minimum(begin + BLOCK + lane * BOX, stop - 1) // PAGE)
                step += 1
            turn += 1


@gluon.jit
def score_span(
    weights_ptr, scales_ptr, tables_ptr, sequences_ptr, num_keys_ptr, out_ptr, items, spans, max_keys, least_keys,
    stride_weights_token, stride_scales_page, stride_tables_seq, keys, queries, bars,
    PART: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, HAS_SCALES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: KEYS keys of each block."""
    BITS: gl.constexpr = keys.dtype.primitive_bitwidth
    BLOCK: gl.constexpr = KEYS * PARTS
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 256 // BITS]
    )
    full, empty, q_full, q_empty = bars
    zeros = gl.zeros([KEYS, HEADS], gl.float32, L)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, L))
    place = PART * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L))
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, first, stop = span_of(item, num_keys_ptr, spans, max_keys, least_keys, SPAN)
        if first < stop:
            row = token.to(gl.int64)
            weight = gl.load(weights_ptr + row * stride_weights_token + head)
            if HAS_SCALES:
                # A block's pages are read two blocks ahead, its keys' scales one.
                table_ptr = tables_ptr + gl.load(sequences_ptr + token).to(gl.int64) * stride_tables_seq
                last = stop - 1
                page = gl.load(table_ptr + gl.minimum(first + place, last) // PAGE)
                next_page = gl.load(table_ptr + gl.minimum(first + BLOCK + place, last) // PAGE)
                scale = load_scales(scales_ptr, page, gl.minimum(first + place, last), stride_scales_page, PAGE)
            q = turn % 2
            mbarrier.wait(q_full.index(q), (turn // 2) & 1)
            for begin in range(first, stop, BLOCK):
                s = step % STAGES
                mbarrier.wait(full.index(s), (step // STAGES) & 1)
                query = queries.index(q).permute((1, 0))
                scores = warpgroup_mma(keys.index(s * PARTS + PART), query, zeros, use_acc=False, is_async=True)
                if HAS_SCALES:
                    factor = scale
                    at = gl.minimum(begin + BLOCK + place, last)
                    scale = load_scales(scales_ptr, next_page, at, stride_scales_page, PAGE)
                    next_page = gl.load(table_ptr + gl.minimum(begin + 2 * BLOCK + place, last) // PAGE)
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(empty.index(s), count=1)
                logits = gl.sum(gl.maximum(scores, 0.0) * weight[None, :], 1)
                if HAS_SCALES:
                    logits = logits * factor
                key = begin + place
                gl.store(out_ptr + row * max_keys + key, logits, mask=key < stop)
                step += 1
            mbarrier.arrive(q_empty.index(q), count=1)
            turn += 1


@gluon.jit
def load_scales(scales_ptr, page, key, stride_scales_page, PAGE: gl.constexpr):
    return gl.load(scales_ptr + page.to(gl.int64) * stride_scales_page + key % PAGE)


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@gluon.jit(
    do_not_specialize=["items", "spans", "max_keys", "least_keys", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def score_spans(
    q_desc, k_desc, weights_ptr, scales_ptr, tables_ptr, sequences_ptr, num_keys_ptr, out_ptr, items, spans, max_keys,
    least_keys, stride_weights_token, stride_scales_page, stride_tables_seq, page_rows,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, HAS_SCALES: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, rank=2)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES * PARTS, KEYS, DIM], TILES)
    arriving = gl.allocate_shared_memory(DTYPE, [2, 1, HEADS, DIM], q_desc.layout)
    queries = arriving._reinterpret(DTYPE, [2, HEADS, DIM], TILES)
    bars = (make_barriers(STAGES, 1), make_barriers(STAGES, PARTS), make_barriers(2, 1), make_barriers(2, PARTS))
    # One expression: what passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (score_span, (
                weights_ptr, scales_ptr, tables_ptr, sequences_ptr, num_keys_ptr, out_ptr, items, spans, max_keys,
                least_keys, stride_weights_token, stride_scales_page, stride_tables_seq, keys, queries, bars,
                gl.constexpr(role), HEADS, PAGE, SPAN, KEYS, STAGES, HAS_SCALES,
            ))
            if role < 2
            else (stream_keys, (
                q_desc, k_desc, tables_ptr, sequences_ptr, num_keys_ptr, items, spans, max_keys, least_keys,
                stride_tables_seq, page_rows, keys, arriving, bars, HEADS, DIM, PAGE, SPAN, KEYS, STAGES,
            ))
            for role in (0, 1, 2)
        ],
        [4, 1],
        [152, 72],
    )  # fmt: skip
