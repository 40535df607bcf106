"""The manager runs in the form that was asked for: `make test-compiled` must not test the Python one."""

from __future__ import annotations

import os

from cache_service.compiled import CORE_FORM


def test_the_manager_runs_in_the_form_that_was_asked_for() -> None:
    assert os.environ.get("STEMCACHE_CORE", "python") == CORE_FORM
