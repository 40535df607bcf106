"""With STEMCACHE_COMPILE=1 mypyc compiles the manager (cache_service/core) to C; pyproject.toml says all the rest.

The same modules run as Python without it. What that gains, and why it is not the default: docs/adr/0013.
"""

import os
from pathlib import Path

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """Returns the extension modules to build: none unless STEMCACHE_COMPILE is 1."""
    if os.environ.get("STEMCACHE_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    modules = sorted(str(path) for path in Path("cache_service/core").rglob("*.py") if path.name != "__init__.py")
    # -O1: -O2 and -O3 take a quarter longer to build and serve no more requests.
    built: list[Extension] = mypycify(modules, group_name="stemcache", opt_level="1", debug_level="0")
    return built


setup(ext_modules=extensions())
