"""Windows and recurrent states of SGLang's models without SGLang: its pools, what is saved, where a request resumes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.sglang.device_pools import DevicePool, device_pools
from adapters.sglang.loads import Load, Loads
from adapters.sglang.offloads import Offloads, Part
from adapters.sglang.reads import PageReads
from adapters.weights import Refused
from tests.tier_client.conftest import common_stage, shared
from tests.tier_client.stage import Stage
from tier_client.client import TierClient
from tier_client.values import PagePath, fingerprint_of

__all__ = ["common_stage", "shared"]

PAGE_TOKENS, SLOTS, WINDOW = 4, 64, 7  # before a token: a boundary needs two pages
FULL, WINDOWED, RECURRENT = {0: 0, 3: 1}, {1: 0}, {2: 0, 4: 1}
COMPONENTS = ["FULL", "SWA", "MAMBA"]


class MHATokenToKVPool(SimpleNamespace):
    """These are known by the names of their classes, as SGLang's."""


class SWAKVPool(SimpleNamespace):
    pass


class HybridLinearKVPool(SimpleNamespace):
    pass


class MambaPool(SimpleNamespace):
    pass


def heads(layers: int, seed: int) -> MHATokenToKVPool:
    generator = torch.Generator().manual_seed(seed)
    arrays = [torch.randn(SLOTS, 2, 8, generator=generator) for _ in range(2 * layers)]
    return MHATokenToKVPool(k_buffer=arrays[:layers], v_buffer=arrays[layers:])


def tokens(seed: int) -> SWAKVPool:
    layers = {layer: (place, False) for layer, place in FULL.items()}
    layers |= {layer: (place, True) for layer, place in WINDOWED.items()}
    return SWAKVPool(full_kv_pool=heads(2, seed), swa_kv_pool=heads(1, seed + 1), layers_mapping=layers)


def requests(seed: int, **changes: Any) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    cache = SimpleNamespace(
        temporal=torch.randn(2, 8, 3, 5, generator=generator), conv=[torch.randn(2, 8, 6, generator=generator).half()]
    )
    usual = {
        "mamba_pool": MambaPool(mamba_cache=cache),
        "mamba_map": RECURRENT,
        "mamba_ckpt_pool": None,
        "short_conv_pool": SimpleNamespace(enabled=False),
        "ngram_pool": SimpleNamespace(enabled=False),
    }
    return SimpleNamespace(**(usual | changes))


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()


def ids(count: int, text: str = "") -> list[bytes]:
    return [hashlib.sha256(f"hybrid {text} {page}".encode()).digest() for page in range(count)]


class Rank:
    """One engine's pools on the stage's tier."""

    def __init__(self, client: TierClient, pools: tuple[DevicePool, ...], **settings: Any) -> None:
        self.pools, self.client = pools, client
        self.offloads = Offloads(client, [pool.pages for pool in pools], 8)
        self.reads = PageReads(client, settings.get("max_bytes", 1 << 20), 30.0, 2, settings.get("least", list))

    def save(self, names: list[bytes], *parts: Part) -> bool:
        self.offloads.add(names, parts, lambda: None)
        while not self.offloads.num_ended():
            threading.Event().wait(0.005)
        return self.offloads.pop_ended()

    def load(self, request: str, names: list[bytes], *rows: torch.Tensor) -> None:
        values = self.reads.take(request, names)
        assert values is not None
        loads = [Load(group, pages, where) for group, (pages, where) in enumerate(zip(values, rows, strict=True))]
        assert list(Loads(self.pools).layers(loads)) == [0, 1, 2, 3, 4]


@contextmanager
def ranked(stage: Stage, seed: int = 0, **settings: Any) -> Iterator[Rank]:
    pools = device_pools(tokens(seed), requests(seed), COMPONENTS, PAGE_TOKENS, WINDOW)
    identity = fingerprint_of({"test": stage.test, "rank": settings.get("rank", 0)})
    with stage.client(*[pool.group for pool in pools], page_tokens=PAGE_TOKENS, fingerprint=identity) as client:
        rank = Rank(client, pools, **settings)
        try:
            yield rank
        finally:
            rank.reads.close()
            rank.offloads.close()


def state(slot: int) -> torch.Tensor:
    return torch.tensor([slot])


def test_what_all_pools_have_for_a_boundary_is_loaded(shared: Stage) -> None:
    names = ids(6)
    with ranked(shared) as first, ranked(shared, seed=10) as second:
        # A prompt of four pages, then its last two with the state behind them: windows begin within the prompt.
        assert first.save(names[:4], Part(0, 4, slots(1, 2, 3, 4)), Part(1, 2, slots(8, 9)), Part(2, 1, state(3)))
        assert first.save(names[4:], Part(0, 2, slots(5, 6)), Part(1, 2, slots(1, 2)))
        before = shared.stats().attachments.usable_pages
        assert second.reads.lengths("a", names) == [4], "no state was left behind the fifth and the sixth page"
        assert shared.stats().attachments.usable_pages == before + 4
        second.load("a", names[:4], slots(11, 12, 13, 14), slots(3, 5), state(6))
        pairs = ((slots(1, 2, 3, 4), slots(11, 12, 13, 14)), (slots(8, 9), slots(3, 5)), (state(3), state(6)))
        for source, target, (was, now) in zip(first.pools, second.pools, pairs, strict=True):
            assert torch.equal(source.pages.read(was), target.pages.read(now)), source.name
        assert second.reads.take("a", names[:4]) is None, "taken once"


def test_half_a_window_is_no_boundary(shared: Stage) -> None:
    names = ids(5, "half")
    with ranked(shared) as rank:
        assert rank.save(names[:2], Part(0, 2, slots(1, 2)), Part(1, 2, slots(1, 2)), Part(2, 1, state(1)))
        assert rank.save(names[2:], Part(0, 3, slots(3, 4, 5)), Part(1, 1, slots(3)), Part(2, 1, state(2)))
        assert rank.reads.lengths("a", names) == [2]
        assert rank.reads.take("a", names) is None, "a longer load than was found"


def test_a_torn_state_moves_the_boundary_ahead(shared: Stage) -> None:
    names = ids(4, "torn")
    with ranked(shared) as rank:
        for end in (2, 4):
            where = slots(*range(1 + end - 2, 1 + end))
            assert rank.save(names[end - 2 : end], Part(0, 2, where), Part(1, 2, where), Part(2, 1, state(end)))
        hit = rank.client.calls.lookup(PagePath(b"".join(names)), 0)
        assert hit is not None and hit.usable_pages == 4
        (key,) = hit.pages[2].keys(0)
        with shared.redis.client() as redis:
            value = redis.get(key)
            assert isinstance(value, bytes)
            redis.set(key, value[:-1] + bytes([value[-1] ^ 1]), keepttl=True)
        corrupt = shared.stats().host_tier.num_corrupt_pages
        assert rank.reads.lengths("a", names) == [2]
        assert shared.stats().host_tier.num_corrupt_pages == corrupt + 1


def test_what_finds_no_room_in_host_memory_ends_at_an_earlier_boundary(shared: Stage) -> None:
    names = ids(4, "room")
    with ranked(shared) as rank:
        for end in (2, 4):
            where = slots(*range(1 + end - 2, 1 + end))
            assert rank.save(names[end - 2 : end], Part(0, 2, where), Part(1, 2, where), Part(2, 1, state(end)))
        sizes = [pool.pages.page_bytes for pool in rank.pools]
    with ranked(shared, max_bytes=3 * sizes[0] + 2 * sizes[1] + sizes[2]) as rank:
        assert rank.reads.lengths("a", names) == [2]
        assert rank.reads.lengths("b", names) == [], "the first read has what is left"
        rank.reads.drop("a")
        rank.reads.drop("b")
        assert rank.reads.lengths("b", names) == [2]


@pytest.mark.parametrize(
    ("cache", "of_requests", "components", "named"),
    [
        pytest.param(heads(1, 0), requests(0), ["FULL", "SWA"], "FULL, SWA layers in a MHATokenToKVPool", id="pool"),
        pytest.param(SimpleNamespace(), None, ["FULL"], "SimpleNamespace is not supported", id="class"),
        pytest.param(
            MHATokenToKVPool(k_scale_buffer=[0], k_buffer=[], v_buffer=[]), None, ["FULL"], "scales", id="scales"
        ),
        pytest.param(MHATokenToKVPool(kv_cache_layout="hnd"), None, ["FULL"], "layout", id="layout"),
        pytest.param(
            tokens(0), requests(0, mamba_ckpt_pool=object()), COMPONENTS, "int8 checkpoint pool", id="checkpoints"
        ),
        pytest.param(
            HybridLinearKVPool(full_kv_pool=heads(2, 0), full_attention_layer_id_mapping=FULL),
            requests(0, ngram_pool=SimpleNamespace(enabled=True)),
            ["FULL", "MAMBA"],
            "ngram_pool",
            id="side states",
        ),
    ],
)
def test_pools_that_would_lose_something_are_refused(
    cache: Any, of_requests: Any, components: list[str], named: str
) -> None:
    with pytest.raises(Refused, match=named):
        device_pools(cache, of_requests, components, PAGE_TOKENS, WINDOW)


def test_a_window_of_unknown_length_is_refused() -> None:
    with pytest.raises(Refused, match="how long"):
        device_pools(tokens(0), None, ["FULL", "SWA"], PAGE_TOKENS, None)
