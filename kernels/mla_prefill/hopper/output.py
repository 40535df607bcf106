"""Where a consumer's results lie, and how they are stored: outputs and log-sum-exps, or the state of all keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.softmax.triton import LN_2

# Outputs as threads store them: 16 bytes of a row each, 64 bytes of 8 rows a warp. Products leave a thread 4 bytes here
# and there, in 32 stores of half a sector each; with those, prompts of 1,024 took 1,622 us instead of 1,413 (H200).
RUNS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)


@gluon.jit
def places(
    q_start,
    q_len,
    head,
    first,
    num_tokens,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    STAT: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Where the statistics and the values of a tile's rows lie, and which rows there are."""
    query = first + gl.arange(0, ROWS, STAT)
    out_query = first + gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    dim = gl.arange(0, 128, gl.SliceLayout(0, VALUES))
    stat_at = head.to(gl.int64) * num_tokens + q_start + query
    out_at = ((q_start + out_query).to(gl.int64) * HEADS + head) * 128
    return stat_at, query < q_len, out_at[:, None] + dim[None, :], (out_query < q_len)[:, None]


@gluon.jit
def store_state(acc_ptr, row_max_ptr, row_sum_ptr, where, row_max, row_sum, acc):
    """Stores what a later call goes on from."""
    stat_at, live, out_at, out_live = where
    gl.store(acc_ptr + out_at, acc, mask=out_live)
    gl.store(row_max_ptr + stat_at, row_max, mask=live)
    gl.store(row_sum_ptr + stat_at, row_sum, mask=live)


@gluon.jit
def store_output(out_ptr, lse_ptr, where, row_max, row_sum, acc, VALUES: gl.constexpr, WANTS_LSE: gl.constexpr):
    """Stores outputs, at places in RUNS, and log-sum-exps."""
    stat_at, live, out_at, out_live = where
    share = gl.convert_layout(gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, VALUES))
    gl.store(out_ptr + out_at, gl.convert_layout((acc / share[:, None]).to(gl.bfloat16), RUNS), mask=out_live)
    if WANTS_LSE:
        lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(row_sum)) * LN_2)
        gl.store(lse_ptr + stat_at, lse, mask=live)
