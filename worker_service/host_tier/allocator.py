"""Keeps freed blocks of a value's size in the process, instead of handing them back to the kernel each time.

Values come and go by the megabyte, and a block fresh from the kernel faults once per 4 KiB: on a virtual machine that
costs more than to read the value from Redis.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 32 << 20  # glibc's upper limit


def keep_freed_blocks(num_bytes: int = 256 << 20) -> bool:
    """Keeps up to `num_bytes` of freed blocks in the process. Returns False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (M_TRIM_THRESHOLD, num_bytes))
    return all(mallopt(option, value) == 1 for option, value in settings)
