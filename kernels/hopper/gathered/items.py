"""Shared by the partitions of attention over gathered keys: work items, partial results and how they end."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.weights import GRID, on_grid
from kernels.hopper.registers import opaque
from kernels.softmax.triton import LOG2_E


@gluon.jit
def item_of(item, keys, COUNT: gl.constexpr, SPLITS: gl.constexpr, pieces, PIECE: gl.constexpr, HEADS: gl.constexpr):
    """(token, tile of heads, first key of the list, behind the last one) of an item, which is a piece where SPLITS."""
    TILES: gl.constexpr = (HEADS + 63) // 64
    tile = item % TILES
    start = 0
    if SPLITS:
        token = item // (TILES * pieces)
        start = item // TILES % pieces * PIECE
        stop = gl.minimum(COUNT(keys, token), start + PIECE)
    else:
        token = item // TILES
        stop = COUNT(keys, token)
    return token, tile, start, stop


@gluon.jit
def part_at(row, dim):
    """Returns the offsets of a partial result: eight values of a row, then eight of the next: stores coalesce."""
    return (opaque(row).to(gl.int64) * 8)[:, None] + (dim // 8 * 512 + dim % 8).to(gl.int64)[None, :]


@gluon.jit
def settle(sums, acc, factors, is_first, is_last, row, dim):
    """Adds a piece to the sum so far, which a thread keeps in memory; returns what the sum becomes."""
    at = sums + part_at(row, dim)
    if is_first == 0:
        so_far = gl.load(at)
        acc = gl.fma(so_far, factors[0][:, None] + gl.zeros_like(acc), acc * factors[1][:, None])
    if is_last == 0:
        gl.store(at, acc)
    return acc


@gluon.jit
def share_of(results, row_max, row_sum, first_head, row, HEADS: gl.constexpr):
    """Returns what sums of values of heads `first_head + row` are multiplied by in the end."""
    return share_with(results, sinks_of(results, opaque(first_head) + row, HEADS), row_max, row_sum)


@gluon.jit
def sinks_of(results, head, HEADS: gl.constexpr):
    """Returns the sinks of heads, results[1]; without sinks what is not used."""
    sink = head
    if results[1] is not None:
        sink = gl.load(results[1] + head, mask=head < HEADS, other=0.0)
    return sink


@gluon.jit
def share_with(results, sink, row_max, row_sum):
    """The same as `share_of`. Where there are sinks, a head's is in the sum of weights, once, and adds no value."""
    if results[1] is None:
        share = 1.0 / row_sum
    else:
        new_max = gl.maximum(row_max, gl.ceil(sink * LOG2_E))
        decay = gl.exp2(row_max - new_max)
        share = decay / gl.fma(row_sum, decay, gl.exp2(on_grid(sink, LOG2_E) - (new_max + GRID)))
    return share
