"""Settings of the connector, from `kv_connector_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adapters.given_settings import CommonSettings


@dataclass(frozen=True, slots=True)
class Settings(CommonSettings):
    """A request waits `call_timeout_s` for its lookup at most, and then computes."""

    option: ClassVar[str] = "kv_connector_extra_config"
    may_be_zero: ClassVar[tuple[str, ...]] = ("inline_wait_s", "compute_tokens_per_s")

    inline_wait_s: float = 0.002
    """How long a scheduling pass waits for a lookup before it passes the request over until the next one."""
    max_staged_mb: int = 512
    """Host memory of each rank for pages that wait to be written; what finds no room there is not saved."""
    compute_tokens_per_s: float = 0.0
    """How fast the engine computes a prompt; what it computes sooner than it reads is not read. 0: all is read."""
    load_threads: int = 4
    save_threads: int = 2
