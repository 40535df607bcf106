"""How programs of mla_decode cut by load keep pace with each other where heads are few and each has one item.

By chance, memory serves some programs sooner than others, and the last ones cannot use all that it gives. A program
that is behind asks for its next tile before the last one has landed: so it gets more of what is read in all, then and
at the end. No result depends on it, and no program waits for another.

`left_ptr` has how many tiles those that have begun have yet to ask for; it is 0 between launches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Items with fewer tiles keep no pace.
LEAST_TILES = gl.constexpr(8)


@gluon.jit
def begin_pace(left_ptr, items, others, tiles):
    """Returns how many programs keep pace, 0 if none do, and how many tiles this one has left.

    One that merges another's part is to end two tiles behind that. `items` are those of the launch.
    """
    programs = gl.where((items <= gl.num_programs(0)) & (tiles >= LEAST_TILES), items, 0)
    own_left = tiles + gl.where(others < 0, 1, gl.where(others > 0, -1, 0))
    gl.atomic_add(left_ptr, own_left, mask=programs > 0, sem="relaxed", scope="gpu")
    return programs, own_left


@gluon.jit
def count_tile(left_ptr, programs):
    """Counts a tile as asked for. Returns how many all programs have left."""
    gl.atomic_add(left_ptr, -1, mask=programs > 0, sem="relaxed", scope="gpu")
    return gl.load(left_ptr, mask=programs > 0, other=0, volatile=True)


@gluon.jit
def is_behind(own_left, all_left, programs):
    """Returns whether a program is a tile or more behind those in step.

    Just after it has asked for a tile, one in step has half a tile less left than all have in the mean.
    """
    return (programs > 0) & (2 * (own_left * programs - all_left) >= programs)


@gluon.jit
def end_pace(left_ptr, programs, own_left):
    gl.atomic_add(left_ptr, -own_left, mask=programs > 0, sem="relaxed", scope="gpu")
