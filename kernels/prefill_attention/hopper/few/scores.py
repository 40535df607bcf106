"""Scores of a round: of n scorers each takes every n-th work, a tile of keys and 64 rows of a kv head."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.prefill_attention.hopper.few.tiles import KEYS, ask_for_rows, copy_queries, copy_tile, half_tile
from kernels.prefill_attention.hopper.weights import capped, visible


@gluon.jit
def key_work(work, tiles, width, HEADS: gl.constexpr):
    """(kv head, tile of the plan, half, place of the key tile in the round, number of the 64 rows) of a work.

    Works of rows that do not exist come together, and neighbours have the same keys.
    """
    head = work % HEADS
    number = work // HEADS % tiles
    place = work // (HEADS * tiles) % width
    half = work // (HEADS * tiles * width)
    return head, number, half, place, (half * tiles + number) * HEADS + head


@gluon.jit
def score_tile(
    buffers, queries, k_pages, v_pages, table_ptr, head, first, token, q_len, kv_len, tile, cap_log2,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    CAP: gl.constexpr, ASKS: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Returns scores [64, 128], unscaled, hidden ones MASKED; with ASKS the values are asked for meanwhile."""
    qs, ks = buffers
    copy_queries(qs, queries, head, first, token, q_len, GQA_GROUP, D)
    copy_tile(ks, k_pages, table_ptr, tile, kv_len, head, HEADS, D, PAGE, HND)
    async_copy.commit_group()
    if ASKS:
        ask_for_rows(v_pages, table_ptr, tile, kv_len, head, HEADS, D, PAGE, HND)
    async_copy.wait_group(0)
    thread_barrier()
    fence_async_shared()
    zeros = gl.zeros([64, KEYS], gl.float32, SL)
    scores = warpgroup_mma(qs, ks.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    thread_barrier()  # the next copies come where these rows are
    cached = kv_len - q_len
    position = cached + first + gl.arange(0, 64, gl.SliceLayout(1, SL)) // GQA_GROUP
    return visible(capped(scores, cap_log2, CAP, False), tile, position, (cached + first + 1) // KEYS, 0, 0, KEYS, SL)


@gluon.jit
def score_round(
    sources, peaks_ptr, buffers, scorer, scorers, tiles, halves, begin, width, cap_log2,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    CAP: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Writes the maxima of a round's scores; returns the last work that had any (-1: none), and its scores."""
    queries, k_pages, v_pages, tables_ptr, stride_tables_seq, records_ptr = sources
    last = scorer * 0 - 1
    scores = gl.zeros([64, KEYS], gl.float32, SL)
    for work in range(scorer, HEADS * tiles * halves * width, scorers):
        head, number, half, place, rows = key_work(work, tiles, width, HEADS)
        seq, first, token, q_len, kv_len, stop = half_tile(records_ptr, number, half, GQA_GROUP)
        if begin + place < stop:
            table_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
            scores = score_tile(
                buffers, queries, k_pages, v_pages, table_ptr, head, first, token, q_len, kv_len, begin + place,
                cap_log2, HEADS, GQA_GROUP, D, PAGE, HND, CAP, True, SL,
            )  # fmt: skip
            row = gl.arange(0, 64, gl.SliceLayout(1, SL))
            gl.store(peaks_ptr + (rows * width + place) * 64 + row, gl.max(scores, 1))
            last = work
    return last, scores
