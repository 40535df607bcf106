"""A launch that begins while the one before it ends (programmatic dependent launch).

A kernel that is launched with `launch_pdl=True` may start once all programs of the launch before it have called
`allow_next_launch` or ended. What it does before `wait_for_last_launch` must not depend on earlier launches: it may
read constants, such as weights, and write nothing that they read. Without `launch_pdl` both do nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_last_launch():
    """Waits until all earlier launches have ended and what they wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allow_next_launch():
    """Lets the next launch begin once all programs of this one have come here."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
