"""What the linker is made of, without SGLang: pages of its pools, reads before loads, offloads in order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.sglang.device_pools import device_pools
from adapters.sglang.identity import check_config, fingerprint
from adapters.sglang.offloads import Offloads, Part
from adapters.sglang.pool_pages import PoolPages
from adapters.sglang.reads import PageReads
from adapters.sglang.settings import Settings, StorageSettings
from adapters.weights import Refused
from session.words import GroupKind
from tests.tier_client.conftest import common_stage, shared
from tests.tier_client.stage import Stage
from tier_client.client import TierClient
from tier_client.values import PageGroup, PagePath

__all__ = ["common_stage", "shared"]

PAGE_TOKENS, LAYERS, SLOTS = 4, 3, 64
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]


class MHATokenToKVPool(SimpleNamespace):
    """Known by the name of its class, as SGLang's."""


class MLATokenToKVPool(SimpleNamespace):
    pass


def heads_pool(dtype: torch.dtype = torch.float32, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)

    def made() -> list[torch.Tensor]:
        return [torch.randn(SLOTS, 2, 8, generator=generator).to(dtype) for _ in range(LAYERS)]

    return MHATokenToKVPool(k_buffer=made(), v_buffer=made())


def token_pages(pool: Any) -> PoolPages:
    return device_pools(pool, None, ["FULL"], PAGE_TOKENS, None)[0].pages


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()


def load(pages: PoolPages, indices: torch.Tensor, values: list[memoryview]) -> None:
    stack = pages.staged(values)
    for layer in range(LAYERS):
        pages.write_layer(layer, indices, stack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_come_back_as_they_went(dtype: torch.dtype) -> None:
    source, target = heads_pool(dtype), heads_pool(dtype, seed=1)
    before = [array.view(torch.uint8).clone() for array in (*target.k_buffer, *target.v_buffer)]
    read = token_pages(source).read(slots(3, 7))
    load(token_pages(target), slots(5, 2), [memoryview(row.numpy()) for row in read])
    arrays = zip((*target.k_buffer, *target.v_buffer), (*source.k_buffer, *source.v_buffer), before, strict=True)
    for got, wanted, old in arrays:
        got, wanted = got.view(torch.uint8), wanted.view(torch.uint8)
        assert torch.equal(got[slots(5, 2)], wanted[slots(3, 7)])
        others = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, slots(5, 2), False)
        assert torch.equal(got[others], old[others])


def test_latents_are_one_array_a_layer() -> None:
    pool = MLATokenToKVPool(kv_buffer=[torch.randn(SLOTS, 1, 12) for _ in range(LAYERS)])
    pages = token_pages(pool)
    assert pages.page_bytes == LAYERS * PAGE_TOKENS * 12 * 4
    wanted = [latents[slots(1)].clone() for latents in pool.kv_buffer]
    load(pages, slots(9), [memoryview(row.numpy()) for row in pages.read(slots(1))])
    assert all(torch.equal(latents[slots(9)], own) for latents, own in zip(pool.kv_buffer, wanted, strict=True))


def ids(count: int, text: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{text} {page}".encode()).digest() for page in range(count)]


def wait_for(gate: threading.Event) -> None:
    assert gate.wait(30)


def part(page: int) -> list[Part]:
    return [Part(0, 1, slots(page))]


class Rank:
    """One engine's pool on the stage's tier."""

    def __init__(self, client: TierClient, pool: Any, **settings: Any) -> None:
        self.client, self.pages = client, token_pages(pool)
        self.offloads = Offloads(client, [self.pages], settings.get("max_waiting", 8))
        self.reads = PageReads(client, settings.get("max_bytes", 1 << 20), 30.0, 2)

    def save(self, page_ids: list[bytes], indices: torch.Tensor) -> bool:
        ready = threading.Event()
        self.offloads.add(page_ids, [Part(0, len(page_ids), indices)], ready.set)
        assert ready.wait(30)
        while not self.offloads.num_ended():
            threading.Event().wait(0.005)
        return self.offloads.pop_ended()


def num_verified(rank: Rank, request: str, names: list[bytes]) -> int:
    lengths = rank.reads.lengths(request, names)
    assert lengths == list(range(1, len(lengths) + 1)), "each page is a boundary"
    return len(lengths)


@contextmanager
def ranked(stage: Stage, **settings: Any) -> Iterator[Rank]:
    pool = heads_pool()
    size = token_pages(pool).page_bytes
    with stage.client(PageGroup("full", GroupKind.FULL, size)) as client:
        rank = Rank(client, pool, **settings)
        try:
            yield rank
        finally:
            rank.reads.close()
            rank.offloads.close()


@pytest.fixture
def rank(shared: Stage) -> Iterator[Rank]:
    with ranked(shared) as rank:
        yield rank


def test_what_was_saved_is_found_once_it_is_verified(rank: Rank, shared: Stage) -> None:
    names = ids(5)
    assert num_verified(rank, "cold", names) == 0
    assert rank.save(names, slots(1, 2, 3, 4, 5))
    assert num_verified(rank, "warm", [*names, *ids(1, "new")]) == 5
    values = rank.reads.take("warm", names)
    assert values is not None
    assert [bytes(value) for value in values[0]] == [
        row.numpy().tobytes() for row in rank.pages.read(slots(1, 2, 3, 4, 5))
    ]
    assert rank.reads.take("warm", names) is None, "taken once"
    assert shared.stats().attachments.usable_pages >= 5


def test_a_shorter_load_takes_its_part_and_another_one_nothing(rank: Rank) -> None:
    names = ids(4)
    assert rank.save(names, slots(1, 2, 3, 4))
    assert num_verified(rank, "a", names) == num_verified(rank, "b", names) == 4
    assert [len(pages) for pages in rank.reads.take("a", names[:2]) or []] == [2]
    assert rank.reads.take("b", names[1:]) is None


def test_only_pages_before_a_damaged_one_count(rank: Rank, shared: Stage) -> None:
    names = ids(6)
    assert rank.save(names, slots(*range(1, 7)))
    hit = rank.client.calls.lookup(PagePath(b"".join(names)), 0)
    assert hit is not None
    key = hit.pages[0].keys(0)[3]
    with shared.redis.client() as redis:
        value = redis.get(key)
        assert isinstance(value, bytes)
        redis.set(key, value[:-1] + bytes([value[-1] ^ 1]), keepttl=True)
    assert num_verified(rank, "torn", names) == 3
    assert num_verified(rank, "again", names) == 3, "the damaged page has left the tier"


def test_host_memory_bounds_what_is_read(shared: Stage) -> None:
    size = token_pages(heads_pool()).page_bytes
    with ranked(shared, max_bytes=3 * size) as rank:
        names = ids(5)
        assert rank.save(names, slots(1, 2, 3, 4, 5))
        assert num_verified(rank, "first", names) == 3
        assert num_verified(rank, "second", names) == 0
        rank.reads.drop("first")
        rank.reads.drop("second")
        assert num_verified(rank, "second", names) == 3


def test_offloads_end_in_order_and_beyond_their_bound_unwritten(shared: Stage) -> None:
    with ranked(shared, max_waiting=1) as rank:
        gate, names = threading.Event(), [ids(1, str(count)) for count in range(3)]
        rank.offloads.add(names[0], part(1), partial(wait_for, gate))
        rank.offloads.add(names[1], part(2), lambda: None)
        gate.set()
        while rank.offloads.num_ended() < 2:
            threading.Event().wait(0.005)
        assert [rank.offloads.pop_ended(), rank.offloads.pop_ended()] == [True, False]
        assert rank.save(names[2], slots(3)), "there is room again"
        assert [num_verified(rank, str(count), name) for count, name in enumerate(names)] == [1, 0, 1]


def test_a_drain_leaves_nothing_behind(rank: Rank) -> None:
    gate = threading.Event()
    rank.offloads.add(ids(1, "a"), part(1), partial(wait_for, gate))
    rank.offloads.add(ids(1, "b"), part(2), lambda: None)
    threading.Timer(0.05, gate.set).start()
    rank.offloads.drain()
    assert rank.offloads.num_ended() == 0
    assert rank.save(ids(1, "c"), slots(3))


def test_an_offload_that_fails_ends_and_the_next_one_is_written(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    rank.offloads.add(ids(1, "fails"), part(1), fail)
    while not rank.offloads.num_ended():
        threading.Event().wait(0.005)
    assert not rank.offloads.pop_ended() and "the device is lost" in caplog.text
    assert rank.save(ids(1, "next"), slots(2))


def test_a_drain_is_no_offload_that_ended(rank: Rank) -> None:
    """SGLang frees an offload's pages when it has ended: one that is counted too soon is read when they are others'."""
    with rank.offloads._lock:  # the thread is slow behind the drain
        rank.offloads.drain()
    assert rank.save(ids(1, "after"), slots(3))
    assert rank.offloads.num_ended() == 0


def arguments(folder: str, **changes: object) -> SimpleNamespace:
    usual = {
        "model_path": folder, "dtype": "bfloat16", "kv_cache_dtype": "auto", "quantization": None, "tp_size": 1,
        "pp_size": 1, "dp_size": 1, "speculative_algorithm": None,
    }  # fmt: skip
    return SimpleNamespace(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "components", "named"),
    [
        ({}, ["FULL", "C128"], "has C128, FULL layers"),
        ({"speculative_algorithm": "EAGLE"}, ["FULL"], "speculative_algorithm"),
        ({"pp_size": 2}, ["FULL"], "pp_size is 2"),
        ({"dcp_size": 2}, ["FULL"], "dcp_size is 2"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    changes: dict[str, object], components: list[str], named: str
) -> None:
    with pytest.raises(Refused, match=named):
        check_config(arguments("", **changes), SimpleNamespace(is_eagle=False), components)
    check_config(arguments(""), SimpleNamespace(is_eagle=False), ["FULL"])


@pytest.mark.parametrize("params", [{"is_eagle": True}, {"is_eagle": False, "attn_cp_size": 2}], ids=str)
def test_what_sglang_has_made_of_its_arguments_is_refused_too(params: dict[str, object]) -> None:
    with pytest.raises(Refused, match=r"speculative_algorithm|attn_cp_size is 2"):
        check_config(arguments(""), SimpleNamespace(**params), ["FULL"])


def test_every_part_of_the_identity_tells_engines_apart(tmp_path: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    pages, folder = device_pools(heads_pool(), None, ["FULL"], PAGE_TOKENS, None), str(tmp_path)
    seen = {fingerprint(arguments(folder), pages, 0, "", ["0.5.23"])}
    for changes in ({"dtype": "float16"}, {"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "fp8"}, {"tp_size": 2}):
        seen.add(fingerprint(arguments(folder, **changes), pages, 0, "", ["0.5.23"]))
    seen.add(fingerprint(arguments(folder), pages, 1, "", ["0.5.23"]))
    seen.add(fingerprint(arguments(folder), pages, 0, "", ["0.5.24"]))
    halves = device_pools(heads_pool(torch.bfloat16), None, ["FULL"], PAGE_TOKENS, None)
    seen.add(fingerprint(arguments(folder), halves, 0, "", ["0.5.23"]))
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    seen.add(fingerprint(arguments(folder), pages, 0, "", ["0.5.23"]))
    seen.add(fingerprint(arguments(folder), pages, 0, "ab", ["0.5.23"]))
    assert len(seen) == 10
    with pytest.raises(Refused, match="model_digest"):
        fingerprint(arguments("org/model"), pages, 0, "", [])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"host": "x"}, "host: unknown"),
        ({"read_threads": 0}, "read_threads"),
        ({"model_digest": "xyz"}, "hexadecimal"),
        ({"lookup_wait_s": float("nan")}, "lookup_wait_s"),
        ({"pause_s": float("inf")}, "pause_s"),
    ],
)
def test_bad_settings_are_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Settings.read(given)


def test_the_storage_has_no_setting_of_the_linker() -> None:
    with pytest.raises(ValueError, match=r"backend_extra_config\.read_threads: unknown"):
        StorageSettings.read({"read_threads": 2})
