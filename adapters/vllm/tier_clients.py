"""Where the connector gets the tier from."""

from __future__ import annotations

from typing import NamedTuple

from adapters.vllm.layout import Layout
from adapters.vllm.settings import Settings
from adapters.vllm.tier import PageIndex, PageStore


class Attachment(NamedTuple):
    """What this engine tells the service HostTier that it is."""

    engine: str
    fingerprint: bytes
    model: str
    layout: Layout
    num_ranks: int


def make_index(settings: Settings, attachment: Attachment) -> PageIndex:
    raise NotImplementedError


def make_store(settings: Settings) -> PageStore:
    raise NotImplementedError
