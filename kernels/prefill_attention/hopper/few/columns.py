"""What an adder does in a round: its rows' columns over all key tiles, kept for the next round or written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.prefill_attention.hopper.few.tiles import half_tile
from kernels.prefill_attention.hopper.few.values import MOST_PLACES, add_values
from kernels.softmax.triton import LN_2, LOG2_E


@gluon.jit
def column_work(work, tiles, HEADS: gl.constexpr, SLABS: gl.constexpr, ROWS: gl.constexpr):
    """(kv head, tile of the plan, half, first row in it, first column, number of the 64 rows) of a work."""
    GROUPS: gl.constexpr = 64 // ROWS
    head = work % HEADS
    number = work // HEADS % tiles
    slab = work // (HEADS * tiles) % SLABS
    group = work // (HEADS * tiles * SLABS)
    half = group // GROUPS
    return head, number, half, group % GROUPS * ROWS, slab * 64, (half * tiles + number) * HEADS + head


@gluon.jit
def add_round(
    sources, scratch, states, ready, results, buffers, adder, adders, tiles, halves, begin, width, turn,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Adds up the values of a round; rows that see no key behind it are written, the sums of others are kept."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    SLABS: gl.constexpr = D // 64
    _, _, v_pages, tables_ptr, stride_tables_seq, records_ptr = sources
    bases_ptr, acc_ptr, row_sum_ptr = states
    row = gl.arange(0, ROWS, HEAD)
    for work in range(adder, HEADS * tiles * halves * (SLABS * 64 // ROWS), adders):
        head, number, half, inside, column, rows = column_work(work, tiles, HEADS, SLABS, ROWS)
        seq, first, token, q_len, kv_len, stop = half_tile(records_ptr, number, half, GQA_GROUP)
        if (begin < stop) & (first + inside // GQA_GROUP < q_len):
            table_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
            acc = gl.zeros([64, ROWS], gl.float32, VALUES)
            row_sum = gl.full([ROWS], 0.0, gl.float32, HEAD)
            own = gl.arange(0, 64, gl.SliceLayout(1, VALUES))[:, None]
            acc_at = acc_ptr + work * (64 * ROWS) + own * ROWS + row[None, :]
            if turn > 0:
                acc = gl.load(acc_at)
                row_sum = gl.load(row_sum_ptr + work * ROWS + row)
            end = gl.minimum(begin + width, stop)
            for tile in range(begin, end, MOST_PLACES):
                acc, row_sum = add_values(
                    scratch, ready, v_pages, table_ptr, acc, row_sum, rows * width + tile - begin, inside, tile,
                    gl.minimum(MOST_PLACES, end - tile), kv_len, head, column, buffers,
                    HEADS, D, PAGE, HND, ROWS, STAGES, VALUES,
                )  # fmt: skip
            if end == stop:
                base = gl.load(bases_ptr + rows * 128 + turn % 2 * 64 + inside + row, cache_modifier=".cg")
                write_columns(
                    results, head, first, token, q_len, base, row_sum, acc, inside, column,
                    GQA_GROUP, ROWS, WANTS_LSE, HAS_SINKS, VALUES,
                )  # fmt: skip
            else:
                gl.store(acc_at, acc)
                gl.store(row_sum_ptr + work * ROWS + row, row_sum)


@gluon.jit
def write_columns(
    results, head, first, token, q_len, base, row_sum, acc, inside, column, GQA_GROUP: gl.constexpr,
    ROWS: gl.constexpr, WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Writes 64 columns of the rows that exist, from the state of all keys that they see: as `write_rows` does."""
    out_ptr, lse_ptr, sinks_ptr, num_tokens, stride_out_token, stride_out_head = results
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    row = inside + gl.arange(0, ROWS, HEAD)
    if HAS_SINKS:
        sink = gl.load(sinks_ptr + head * GQA_GROUP + row % GQA_GROUP).to(gl.float32) * LOG2_E
        raised = gl.maximum(base, sink)
        decay = gl.exp2(base - raised)
        row_sum = gl.fma(row_sum, decay, gl.exp2(sink - raised))
        acc = acc * decay[None, :]
        base = raised
    acc = acc * (1.0 / row_sum)[None, :]
    narrow = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    row_o = inside + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    query_o = first + row_o // GQA_GROUP
    at = (token + query_o).to(gl.int64) * stride_out_token + (head * GQA_GROUP + row_o % GQA_GROUP) * stride_out_head
    at = at[None, :] + (column + gl.arange(0, 64, gl.SliceLayout(1, OUT)))[:, None]
    gl.store(out_ptr + at, narrow, mask=(query_o < q_len)[None, :])
    if WANTS_LSE:
        query = first + row // GQA_GROUP
        at_s = (head * GQA_GROUP + row % GQA_GROUP).to(gl.int64) * num_tokens + token + query
        gl.store(lse_ptr + at_s, (base + gl.log2(row_sum)) * LN_2, mask=(query < q_len) & (column == 0))
