"""One worker's session as the manager keeps it: its incarnation, its last step, and its device cache."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.core.device_cache import DeviceCache
from session.messages import Hello, StepReply
from session.protocol import INVENTORY


@dataclass(slots=True)
class Worker:
    """A state that the manager made for an incarnation, numbered by `generation`.

    `kept_reply` is the reply to a repeated step; `gone_since_ms` counts towards the grace period.
    """

    hello: Hello
    cache: DeviceCache
    generation: int
    last_step_id: int = 0
    kept_reply: StepReply | None = None
    gone_since_ms: int | None = None
    told_clears: int = 0  # number of the last Clear call that the present stream was told
    forgotten_clears: int = 0  # and of the last one that the worker confirmed
    first_clears: int = 0  # and of the last one that its sequences had met when this state began

    @property
    def connected(self) -> bool:
        return self.gone_since_ms is None

    def met_clears(self, number: int) -> int:
        """Returns the number of the last Clear call that the worker's sequences have met, of `number` calls.

        Those that are yet to be adopted, before the inventory's end, have met none since this state began.
        """
        return number if self.cache.restored.is_complete else self.first_clears

    @property
    def keeps_inventory(self) -> bool:
        return INVENTORY in self.hello.capabilities
