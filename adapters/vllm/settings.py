"""What `kv_connector_extra_config` says to the connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Settings:
    cache: str = "127.0.0.1:7400"
    """Where the cache service listens."""
    redis: str = "redis://127.0.0.1:6379/0"
    """The store that pages are read from and written to, the same that other engines use."""
    model_digest: str = ""
    """Hex. Names the weights, instead of the digest of the model's files or its revision on the hub."""
    call_timeout_s: float = 0.25
    """For one call of the cache service. A request waits this long for its lookup at most, and then computes."""
    store_timeout_s: float = 2.0
    """For one command of the store."""
    pause_s: float = 2.0
    """After a failure nothing is asked for this long."""
    inline_wait_s: float = 0.002
    """How long a scheduling pass waits for a lookup before it passes the request over until the next one."""
    max_staged_mb: int = 512
    """Host memory of each rank for pages that wait to be written; what finds no room there is not saved."""
    load_threads: int = 4
    save_threads: int = 2

    def __post_init__(self) -> None:
        for name in ("call_timeout_s", "store_timeout_s", "pause_s", "max_staged_mb", "load_threads", "save_threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"kv_connector_extra_config.{name}: must be positive")
        if self.inline_wait_s < 0:
            raise ValueError("kv_connector_extra_config.inline_wait_s: must not be negative")
        try:
            bytes.fromhex(self.model_digest)
        except ValueError:
            raise ValueError("kv_connector_extra_config.model_digest: must be hexadecimal") from None


def read_settings(given: Mapping[str, object]) -> Settings:
    """Raises ValueError, which names the field."""
    kinds = {field.name: type(getattr(Settings(), field.name)) for field in fields(Settings)}
    for name, value in given.items():
        if name not in kinds:
            raise ValueError(f"kv_connector_extra_config.{name}: unknown; there are {', '.join(kinds)}")
        allowed = (int, float) if kinds[name] is float else kinds[name]
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError(f"kv_connector_extra_config.{name}: must be of type {kinds[name].__name__}")
    return Settings(**given)  # type: ignore[arg-type]
