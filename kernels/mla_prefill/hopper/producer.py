"""The producer of mla_prefill's kernel: one warp draws items, and loads their queries, keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.stages import await_return
from kernels.hopper.work_queue import draw, leave, publish

# Named barriers of the first stage of keys and of values; the next stage's is the next one.
KEYS_READ = gl.constexpr(8)
VALUES_READ = gl.constexpr(10)


@gluon.jit
def _place(item, order_ptr, tiles, section):
    """Returns (sequence, tile, head) of an item: section by section, in it tile by tile, in it head by head."""
    per_section = tiles * section
    rest = item % per_section
    seq = gl.load(order_ptr + rest // section * 2)
    tile = gl.load(order_ptr + rest // section * 2 + 1)
    return seq, tile, item // per_section * section + rest % section


@gluon.jit
def _extent(seq, tile, cu_q_ptr, cu_k_ptr, offsets_ptr, BLOCK: gl.constexpr, MODE: gl.constexpr):
    """Returns a query tile's (first query, queries, first key, keys, position of query 0 among the keys, key tiles)."""
    q_start = gl.load(cu_q_ptr + seq)
    q_len = gl.load(cu_q_ptr + seq + 1) - q_start
    k_start = gl.load(cu_k_ptr + seq)
    k_len = gl.load(cu_k_ptr + seq + 1) - k_start
    if MODE == 0:
        offset = k_len - q_len
    elif MODE == 1:
        offset = gl.load(offsets_ptr + seq)
    else:
        offset = k_len
    seen = gl.minimum(k_len, offset + gl.minimum(q_len, (tile + 1) * BLOCK))
    return q_start, q_len, k_start, k_len, offset, (gl.maximum(seen, 0) + BLOCK - 1) // BLOCK


@gluon.jit
def _load_keys(keys, row, head, step, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Loads a tile's keys as soon as their stage is free."""
    nope_desc, rope_desc, nope, rope, full, stride_nope_head, stride_rope_head = keys
    s = step % STAGES
    if step >= STAGES:
        await_return(KEYS_READ + s)
    mbarrier.expect(full.index(s), BLOCK * 192 * 2)
    tma.async_copy_global_to_shared(nope_desc, [row, head * stride_nope_head], full.index(s), nope.index(s))
    tma.async_copy_global_to_shared(rope_desc, [row, head * stride_rope_head], full.index(s), rope.index(s))


@gluon.jit
def _load_queries(queries, row, head, loads, PART: gl.constexpr, HALF: gl.constexpr):
    """Loads a consumer's queries when it is done with those of `loads` items before."""
    nope_desc, rope_desc, nope, rope, full, empty, stride_head = queries
    mbarrier.wait(empty.index(PART), (loads & 1) ^ 1)
    mbarrier.expect(full.index(PART), HALF * 192 * 2)
    row += PART * HALF
    tma.async_copy_global_to_shared(nope_desc, [row, head * stride_head], full.index(PART), nope.index(PART))
    tma.async_copy_global_to_shared(rope_desc, [row, head * stride_head + 128], full.index(PART), rope.index(PART))


@gluon.jit
def produce(
    q_nope_desc,
    q_rope_desc,
    k_nope_desc,
    k_rope_desc,
    v_desc,
    plan,
    strides,
    section,
    shared,
    bars,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    MODE: gl.constexpr,
    IDLES: gl.constexpr,
):
    """Streams queries, keys and values of all items of this program, as far ahead as the stages allow."""
    order_ptr, counts_ptr, cu_q_ptr, cu_k_ptr, offsets_ptr = plan
    stride_q_head, stride_nope_head, stride_rope_head, stride_v_head = strides
    q_nope, q_rope, k_nope, k_rope, v, queue = shared
    q_full, q_empty, k_full, v_full, queue_full, queue_empty = bars
    queries = (q_nope_desc, q_rope_desc, q_nope, q_rope, q_full, q_empty, stride_q_head)
    keys = (k_nope_desc, k_rope_desc, k_nope, k_rope, k_full, stride_nope_head, stride_rope_head)
    programs = gl.num_programs(0)
    tiles = gl.load(counts_ptr)
    items = tiles * HEADS
    item = gl.program_id(0)
    turn = 0
    loads = 0
    # Of the second consumer, which passes over items.
    own_loads = 0
    step = 0
    while item < items:
        seq, tile, head = _place(item, order_ptr, tiles, section)
        q_start, q_len, k_start, k_len, offset, count = _extent(seq, tile, cu_q_ptr, cu_k_ptr, offsets_ptr, BLOCK, MODE)
        publish(queue, queue_full, queue_empty, turn, (head, q_start, tile, q_len, k_len, offset, count))
        turn += 1
        if count > 0:
            _load_keys(keys, k_start, head, step, BLOCK, STAGES)
            # Behind the first keys: these have room before the last item's queries are done with.
            _load_queries(queries, q_start + tile * BLOCK, head, loads, 0, BLOCK // 2)
            if not IDLES:
                _load_queries(queries, q_start + tile * BLOCK, head, loads, 1, BLOCK // 2)
            elif tile * BLOCK + BLOCK // 2 < q_len:
                _load_queries(queries, q_start + tile * BLOCK, head, own_loads, 1, BLOCK // 2)
                own_loads += 1
            loads += 1
        for i in range(count):
            # A tile's keys are read before the values of the tile ahead of it, so they are asked for first.
            if i + 1 < count:
                _load_keys(keys, k_start + (i + 1) * BLOCK, head, step + 1, BLOCK, STAGES)
            s = step % STAGES
            if step >= STAGES:
                await_return(VALUES_READ + s)
            mbarrier.expect(v_full.index(s), BLOCK * 128 * 2)
            tma.async_copy_global_to_shared(
                v_desc, [k_start + i * BLOCK, head * stride_v_head], v_full.index(s), v.index(s)
            )
            step += 1
        item = draw(counts_ptr + 1, programs)
    publish(queue, queue_full, queue_empty, turn, (-1, 0, 0, 0, 0, 0, 0))
    leave(counts_ptr + 1, programs)
