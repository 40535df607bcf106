"""Sums that are rescaled only where a factor is not 1: a product with 1 changes no bit."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Sums of a thread that one piece of PTX multiplies.
PACK = 32


def _source(pack: int) -> str:
    """Returns PTX that multiplies `pack` sums of a thread, of two rows by turns two of each as accumulators of a wgmma
    lie, unless all factors of its warp are 1. A label is known in its block alone."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * pack + i};" for i in range(pack))
    return (
        f"{{ .reg .pred p; setp.neu.f32 p, ${2 * pack}, 0f3F800000; setp.neu.or.f32 p, ${2 * pack + 2}, 0f3F800000, p;"
        f" vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni L; {products} L: }}"
    )


SOURCE = gl.constexpr(_source(PACK))
CONSTRAINTS = gl.constexpr(",".join(["=f"] * PACK + [str(i) for i in range(PACK)] + ["f"] * PACK))
SUMS = gl.constexpr(PACK)


@gluon.jit
def rescaled(acc, decay):
    """Returns accumulators [rows, columns] times decay [rows]; a warp all of whose factors are 1 multiplies nothing."""
    factors = gl.zeros_like(acc) + decay[:, None]
    return gl.inline_asm_elementwise(
        SOURCE, CONSTRAINTS, [acc, factors], dtype=gl.float32, is_pure=True, pack=SUMS
    )  # fmt: skip
