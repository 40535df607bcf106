"""What `linker_extra_config` says to the linker."""

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
    """Hex. Names the weights, instead of the digest of the files in the model's folder."""
    call_timeout_s: float = 0.25
    """For one call of the cache service."""
    store_timeout_s: float = 1.0
    """For one command of the store."""
    lookup_wait_s: float = 0.25
    """How long one lookup holds SGLang's scheduler at most while pages are read; all together a tenth of the time."""
    max_staged_mb: int = 1024
    """Host memory for pages that were read and are not in the device's pool yet."""
    max_waiting_offloads: int = 256
    """Offloads that wait to be written; what is beyond them is not saved."""
    read_threads: int = 4

    def __post_init__(self) -> None:
        for name in ("call_timeout_s", "store_timeout_s", "max_staged_mb", "max_waiting_offloads", "read_threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"linker_extra_config.{name}: must be positive")
        if self.lookup_wait_s < 0:
            raise ValueError("linker_extra_config.lookup_wait_s: must not be negative")
        try:
            bytes.fromhex(self.model_digest)
        except ValueError:
            raise ValueError("linker_extra_config.model_digest: must be hexadecimal") from None


def read_settings(given: Mapping[str, object]) -> Settings:
    """Raises ValueError, which names the field."""
    kinds = {field.name: type(getattr(Settings(), field.name)) for field in fields(Settings)}
    for name, value in given.items():
        if name not in kinds:
            raise ValueError(f"linker_extra_config.{name}: unknown; there are {', '.join(kinds)}")
        allowed = (int, float) if kinds[name] is float else kinds[name]
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError(f"linker_extra_config.{name}: must be of type {kinds[name].__name__}")
    return Settings(**given)  # type: ignore[arg-type]
