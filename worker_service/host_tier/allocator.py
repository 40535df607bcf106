"""Memory for values that come and go by the megabyte.

Knows no tier. A block fresh from the kernel faults once per 4 KiB, which on a virtual machine costs more than to read
the value from Redis; and to zero a block that is about to be overwritten costs a tenth of that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 32 << 20  # glibc's upper limit

_NewByteArray = Callable[[bytes | None, int], bytearray]


def _find_new_byte_array() -> _NewByteArray | None:
    """CPython's own constructor, which copies nothing when it gets no bytes, and so leaves the memory as it is."""
    try:
        function = ctypes.pythonapi.PyByteArray_FromStringAndSize
    except AttributeError:
        return None
    function.restype = ctypes.py_object
    function.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
    return function


_new_byte_array = _find_new_byte_array()


def unset_bytearray(size: int) -> bytearray:
    """A bytearray of that size with anything in it: overwrite all of it before anybody else sees it."""
    return bytearray(size) if _new_byte_array is None else _new_byte_array(None, size)


def keep_freed_blocks(num_bytes: int = 256 << 20) -> bool:
    """Keep up to `num_bytes` of freed blocks, in the whole process; False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (M_TRIM_THRESHOLD, num_bytes))
    return all(mallopt(option, value) == 1 for option, value in settings)
