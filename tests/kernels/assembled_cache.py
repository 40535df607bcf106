"""Keeps what became of a kernel between runs, so that one that did not change is not compiled again.

The key is Triton's own: the sources of the kernel and of all that it calls, its types and constants, the options, and
the versions of Triton and of the assembler. A thorough run (`make nightly`'s setting) compiles everything anew, and so
does a checkout without the folder.
"""

import hashlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from tests.examples import THOROUGH

FOLDER = Path(__file__).parent.parent.parent / ".assembled"
# 100 kernels are compiled, of about 20 KB each; what is left are former versions of them.
MAX_KEPT = 1000


def key_of(source: Any, target: Any, options: dict[str, object]) -> str:
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def recall(key: str) -> list[Any] | None:
    """Returns what was kept under this key; None where nothing was, or what was is damaged."""
    if THOROUGH:
        return None
    try:
        kept: list[Any] = json.loads(zlib.decompress((FOLDER / key).read_bytes()))
    except (OSError, ValueError, zlib.error):
        return None
    os.utime(FOLDER / key)
    return kept


def keep(key: str, value: tuple[Any, ...]) -> None:
    """Drops those used longest ago beyond MAX_KEPT."""
    FOLDER.mkdir(exist_ok=True)
    draft = FOLDER / f"{key}.{os.getpid()}"
    draft.write_bytes(zlib.compress(json.dumps(value).encode()))
    draft.replace(FOLDER / key)
    oldest_last = sorted(FOLDER.iterdir(), key=_used_at, reverse=True)
    for path in oldest_last[MAX_KEPT:]:
        path.unlink(missing_ok=True)


def _used_at(path: Path) -> float:
    """Returns a time of modification, in seconds; that of a draft which another process has just renamed is now."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
