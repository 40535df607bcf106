"""The version of the installed package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    """Returns the installed package's version; empty where only its modules were copied."""
    try:
        return version("stemcache")
    except PackageNotFoundError:
        return ""
