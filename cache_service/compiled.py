"""Says how the manager runs: as Python, or compiled by mypyc (setup.py)."""

from __future__ import annotations

from cache_service.core import cache_manager

IS_COMPILED = not (cache_manager.__file__ or "").endswith(".py")
CORE_FORM = "compiled" if IS_COMPILED else "python"
