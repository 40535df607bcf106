"""SGLang's device pools as groups of pages: keys and values of all tokens, those in a window, recurrent states.

Pools are known by the names of their classes: another class may keep scales, an index or slots elsewhere, and pages
without them would give wrong tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from adapters.sglang.pool_pages import PoolPages
from adapters.weights import Refused
from session.words import GroupKind
from tier_client.values import PageGroup

# SGLang's names of transfers.
KV, SWA, MAMBA = "kv", "swa", "mamba"
# The pool that goes with a model's tree components.
POOLS = {
    frozenset({"FULL"}): ("MHATokenToKVPool", "MLATokenToKVPool"),
    frozenset({"FULL", "SWA"}): ("SWAKVPool",),
    frozenset({"FULL", "MAMBA"}): ("HybridLinearKVPool",),
    frozenset({"FULL", "SWA", "MAMBA"}): ("SWAKVPool",),
}
# Arrays beside keys and values that a page would have to hold too.
SCALES = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer", "index_k_with_scale_buffer")
SIDE_STATES = ("short_conv_pool", "ngram_pool")


class DevicePool(NamedTuple):
    """`layers`: from the model's layers to those of the pool."""

    name: str
    group: PageGroup
    pages: PoolPages
    layers: Mapping[int, int]


def device_pools(
    cache: Any, requests: Any, components: Collection[str], page_tokens: int, window_tokens: int | None
) -> tuple[DevicePool, ...]:
    """Returns the pool of all tokens first. Raises Refused for pools that are not known.

    `cache` and `requests`: SGLang's pools of tokens and of requests; `window_tokens`: before a token, without itself.
    """
    names = frozenset(components)
    if type(cache).__name__ not in POOLS.get(names, ()):
        raise Refused(f"a model of {', '.join(sorted(names))} layers in a {type(cache).__name__} is not supported")
    if names == {"FULL"}:
        pages = _token_pages(cache, page_tokens)
        return (DevicePool(KV, _group(KV, GroupKind.FULL, pages), pages, _all_layers(cache)),)
    is_window = getattr(cache, "layers_mapping", {})
    layers = {layer: place for layer, (place, windowed) in is_window.items() if not windowed}
    pages = _token_pages(cache.full_kv_pool, page_tokens)
    found = [
        DevicePool(
            KV,
            _group(KV, GroupKind.FULL, pages),
            pages,
            layers or dict(getattr(cache, "full_attention_layer_id_mapping", {})),
        )
    ]
    if "SWA" in names:
        layers = {layer: place for layer, (place, windowed) in is_window.items() if windowed}
        found.append(_window_pool(cache.swa_kv_pool, layers, page_tokens, window_tokens))
    if "MAMBA" in names:
        found.append(_state_pool(requests))
    return tuple(found)


def _window_pool(pool: Any, layers: Mapping[int, int], page_tokens: int, window_tokens: int | None) -> DevicePool:
    if not window_tokens:
        raise Refused("the model has windows, but SGLang does not say how long they are")
    pages = _token_pages(pool, page_tokens)
    return DevicePool(SWA, PageGroup(SWA, GroupKind.WINDOW, pages.page_bytes, window_tokens + 1), pages, layers)


def _state_pool(requests: Any) -> DevicePool:
    """Returns the pool of states: a page is one slot in all layers, named by the boundary that the state is of."""
    pool = requests.mamba_pool
    if type(pool).__name__ != "MambaPool" or requests.mamba_ckpt_pool is not None:
        raise Refused(f"states in a {type(pool).__name__}, or in an int8 checkpoint pool, are not supported")
    for name in SIDE_STATES:
        if getattr(requests, name).enabled:
            raise Refused(f"the model keeps states in {name} too; they are not saved")
    states = [state for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if state.numel()]
    layers = dict(requests.mamba_map)
    pages = PoolPages([[state[layer] for state in states] for layer in range(len(layers))], page_rows=1)
    return DevicePool(MAMBA, _group(MAMBA, GroupKind.STATE, pages), pages, layers)


def _token_pages(pool: Any, page_tokens: int) -> PoolPages:
    kind = type(pool).__name__
    if any(getattr(pool, name, None) is not None for name in SCALES):
        raise Refused(f"the {kind} keeps scales or an index beside its keys; they are not saved")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd" or getattr(pool, "layer_shard_enabled", False):
        raise Refused(f"the {kind} has another layout than rows of tokens, or layers on other ranks")
    arrays: list[list[torch.Tensor]]
    if kind == "MHATokenToKVPool":
        arrays = [list(pair) for pair in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    elif kind == "MLATokenToKVPool":
        arrays = [[latents] for latents in pool.kv_buffer]
    else:
        raise Refused(f"the pool {kind} is not supported")
    return PoolPages(arrays, page_tokens)


def _group(name: str, kind: GroupKind, pages: PoolPages) -> PageGroup:
    return PageGroup(name, kind, pages.page_bytes)


def _all_layers(pool: Any) -> dict[int, int]:
    return {layer: layer for layer in range(len(getattr(pool, "k_buffer", None) or pool.kv_buffer))}
