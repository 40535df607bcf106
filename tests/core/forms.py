"""The two forms of the manager: Python, or compiled by mypyc (`make test-compiled`)."""

from __future__ import annotations

import pytest

from cache_service.compiled import IS_COMPILED

python_only = pytest.mark.skipif(IS_COMPILED, reason="replaces a part of the manager, which only Python allows")
