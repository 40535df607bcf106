"""Settings of the linker and of the storage, from SGLang's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adapters.given_settings import CommonSettings


@dataclass(frozen=True, slots=True)
class Settings(CommonSettings):
    option: ClassVar[str] = "linker_extra_config"
    may_be_zero: ClassVar[tuple[str, ...]] = ("lookup_wait_s",)

    lookup_wait_s: float = 0.25
    """How long one lookup holds SGLang's scheduler at most while pages are read; all together a tenth of the time."""
    max_staged_mb: int = 1024
    """Host memory for pages that were read and are not in the device's pool yet."""
    max_waiting_offloads: int = 256
    """Offloads that wait to be written; what is beyond them is not saved."""
    read_threads: int = 4


@dataclass(frozen=True, slots=True)
class StorageSettings(CommonSettings):
    option: ClassVar[str] = "hicache_storage_backend_extra_config"
