"""What is left when a tile's keys are done: sinks, the division by the sum, and the stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.prefill_attention.hopper.weights import zero
from kernels.softmax.triton import LN_2, LOG2_E


@gluon.constexpr_function
def _runs(dim):
    """How threads store 64 rows: 8 bytes each, four threads a sector. Products leave a thread 4 bytes here and there.

    In 32 stores of half a sector each, 16 prompts of 1,024 tokens took 317 us in place of 284 (H200).
    """
    blocks = [[0, 16 << i] for i in range((dim // 16).bit_length() - 1)]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *blocks, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, dim])


@gluon.jit
def _widened_here(stride, D: gl.constexpr):
    """A stride whose upper half an address needs: made here, and still known to be a multiple of 16 if it is one."""
    return stride + 16 * zero(D)


@gluon.jit
def write_rows(
    out_ptr, lse_ptr, sinks_ptr, v_scales_ptr, num_tokens, stride_out_token, stride_out_head,
    head, first, token, q_len, base, row_sum, acc,
    PART: gl.constexpr, GQA_GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr, WANTS_LSE: gl.constexpr,
    HAS_SINKS: gl.constexpr, SCALES: gl.constexpr, DTYPE: gl.constexpr, RS: gl.constexpr, RO: gl.constexpr,
):  # fmt: skip
    """Writes the 64 rows of a consumer that exist, from the state of all keys that they see."""
    QUERIES: gl.constexpr = 128 // GQA_GROUP
    # Row numbers are made when they are needed: the loop over keys has no registers for them.
    row_s = PART * 64 + gl.arange(0, 64, RS) + zero(D)
    if HAS_SINKS:
        # Once, behind the last key: the sink has no value, so it only adds to the sum.
        sink = gl.load(sinks_ptr + head * GQA_GROUP + row_s % GQA_GROUP).to(gl.float32) * LOG2_E
        raised = gl.maximum(base, sink)
        decay = gl.exp2(base - raised)
        row_sum = gl.fma(row_sum, decay, gl.exp2(sink - raised))
        acc = acc * gl.convert_layout(decay, RO)[:, None]
        base = raised
    weight = 1.0 / row_sum
    if SCALES:
        weight = weight * gl.load(v_scales_ptr)
    acc = acc * gl.convert_layout(weight, RO)[:, None]
    RUNS: gl.constexpr = _runs(D)
    row = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, RUNS)) + zero(D)
    query = first + row // GQA_GROUP
    live = (row < QUERIES * GQA_GROUP) & (query < q_len)
    at = (token + query).to(gl.int64) * _widened_here(stride_out_token, D)
    at += (head * GQA_GROUP + row % GQA_GROUP) * stride_out_head
    d = gl.arange(0, D, gl.SliceLayout(0, RUNS))
    outputs = gl.convert_layout(acc.to(DTYPE), RUNS)
    gl.store(out_ptr + at[:, None] + d[None, :], outputs, mask=live[:, None] & (d < DIM)[None, :])
    if WANTS_LSE:
        query_s = first + row_s // GQA_GROUP
        live_s = (row_s < QUERIES * GQA_GROUP) & (query_s < q_len)
        at_s = (head * GQA_GROUP + row_s % GQA_GROUP).to(gl.int64) * _widened_here(num_tokens, D) + token + query_s
        gl.store(lse_ptr + at_s, (base + gl.log2(row_sum)) * LN_2, mask=live_s)
