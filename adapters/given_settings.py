"""Settings of a plug-in, read from a JSON object in its engine's configuration into a dataclass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from tier_client.large_pages import PART_BYTES
from tier_client.values import TierClientConfig


@dataclass(frozen=True, slots=True)
class CommonSettings:
    """Numbers must be positive, but for those in `may_be_zero`. Errors name the field behind `option`."""

    option: ClassVar[str]
    may_be_zero: ClassVar[tuple[str, ...]] = ()

    cache: str = "127.0.0.1:7400"
    """Where the cache service listens."""
    redis: str = "redis://127.0.0.1:6379/0"
    """The store that pages are read from and written to, the same that other engines use."""
    model_digest: str = ""
    """Hex. Names the weights, instead of the digest of the model's files."""
    call_timeout_s: float = 0.25
    """For one call of the cache service."""
    store_timeout_s: float = 2.0
    """For one command of the store."""
    transfer_timeout_s: float = 5.0
    """For all pages of one group in a load or a save."""
    host_part_kb: int = PART_BYTES >> 10
    """Larger pages move in parts of this size; engines that share pages have the same."""
    pause_s: float = 2.0
    """After a failure nothing is asked for this long."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, str):
                continue
            # Python reads NaN and Infinity from JSON, too.
            if not 0 <= value < math.inf or (value == 0 and field.name not in self.may_be_zero):
                wanted = "must not be negative" if field.name in self.may_be_zero else "must be positive"
                raise ValueError(f"{self.option}.{field.name}: {wanted}")
        try:
            bytes.fromhex(self.model_digest)
        except ValueError:
            raise ValueError(f"{self.option}.model_digest: must be hexadecimal") from None

    def client_config(self, **engine: Any) -> TierClientConfig:
        """Returns the client's configuration. `engine`: its fields that say who attaches, and those of no setting."""
        return TierClientConfig(
            cache_address=self.cache,
            redis_url=self.redis,
            call_timeout_s=self.call_timeout_s,
            store_timeout_s=self.store_timeout_s,
            transfer_timeout_s=self.transfer_timeout_s,
            pause_s=self.pause_s,
            part_bytes=self.host_part_kb << 10,
            **engine,
        )

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Raises ValueError, which names the field."""
        kinds = {field.name: type(getattr(cls(), field.name)) for field in fields(cls)}
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"{cls.option}.{name}: unknown; there are {', '.join(kinds)}")
            allowed = (int, float) if kinds[name] is float else kinds[name]
            if isinstance(value, bool) or not isinstance(value, allowed):
                raise ValueError(f"{cls.option}.{name}: must be of type {kinds[name].__name__}")
        return cls(**given)  # type: ignore[arg-type]
