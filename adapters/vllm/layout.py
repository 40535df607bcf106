"""vLLM's KV cache groups as the tier knows groups: a resume rule, layers, and the bytes of a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from session.words import GroupKind


class GroupLayout(NamedTuple):
    """`layers` in the order in which a page has them; `layer_bytes`: what a page has of each.

    `content`: of recurrent states, their shapes and dtypes. `replicated`: every rank has the same bytes.
    """

    kind: GroupKind
    window_tokens: int
    layers: tuple[str, ...]
    layer_bytes: tuple[int, ...]
    content: str = ""
    replicated: bool = False

    @property
    def page_bytes(self) -> int:
        return sum(self.layer_bytes)


class Layout(NamedTuple):
    """`name`: how vLLM orders a block's bytes. One block has `page_tokens` tokens in every group."""

    name: str
    page_tokens: int
    num_blocks: int
    groups: tuple[GroupLayout, ...]

    @property
    def is_one_full_group(self) -> bool:
        return len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL


def read_layout(kv_cache: Any, kind_of: Callable[[Any], str], layers_of: Callable[[Any], Any]) -> Layout:
    """Raises ValueError for groups that the tier has no rule for. `kind_of` and `layers_of` read vLLM's specs."""
    if not kv_cache.kv_cache_groups:
        raise ValueError("the model has no KV cache group")
    page_tokens = kv_cache.kv_cache_groups[0].kv_cache_spec.block_size
    hash_tokens = kv_cache.hash_block_size or page_tokens
    groups = []
    for number, group in enumerate(kv_cache.kv_cache_groups):
        spec = group.kv_cache_spec
        if number not in kv_cache.prefix_cacheable_group_ids:
            raise ValueError(f"KV cache group {number} ({type(spec).__name__}) has no prefix cache in vLLM")
        if not spec.block_size == page_tokens == hash_tokens:
            raise ValueError(
                f"KV cache group {number} has blocks of {spec.block_size} tokens, the first one of {page_tokens}, "
                f"block hashes are of {hash_tokens}; they must be equal"
            )
        groups.append(_group(number, group, kind_of(spec), layers_of(spec)))
    return Layout(str(kv_cache.kv_cache_layout), page_tokens, kv_cache.num_blocks, tuple(groups))


def _group(number: int, group: Any, kind: str, specs: Any) -> GroupLayout:
    layers = tuple(sorted(group.layer_names))
    of_layer = group.kv_cache_spec.kv_cache_specs if hasattr(group.kv_cache_spec, "kv_cache_specs") else {}
    # Without what vLLM adds so that blocks of several kinds have one size.
    sizes = tuple(int(of_layer.get(layer, group.kv_cache_spec).real_page_size_bytes) for layer in layers)
    if kind == "mamba":
        return GroupLayout(GroupKind.STATE, 0, layers, sizes, _states(number, specs))
    if kind in ("full_attention", "mla_attention"):
        # Every rank keeps the same latents.
        return GroupLayout(GroupKind.FULL, 0, layers, sizes, replicated=kind == "mla_attention")
    windows = {int(getattr(spec, "sliding_window", None) or 0) for spec in specs}
    if kind == "sliding_window" and len(windows) == 1 and min(windows) > 0:
        return GroupLayout(GroupKind.WINDOW, windows.pop(), layers, sizes)
    raise ValueError(
        f"KV cache group {number} is of kind {kind!r}; full attention, a window and recurrent states are served"
    )


def _states(number: int, specs: Any) -> str:
    """Returns shapes and dtypes of a group's states. Raises ValueError where vLLM keeps none at the ends of blocks."""
    for spec in specs:
        if spec.mamba_cache_mode != "align":
            raise ValueError(
                f"KV cache group {number} has mamba_cache_mode {spec.mamba_cache_mode!r}; must be 'align': in "
                "other modes vLLM keeps no state at the end of a block"
            )
        if spec.num_speculative_blocks:
            raise ValueError(f"KV cache group {number}: recurrent states are not served with speculative_config")
    return "; ".join(sorted({f"{spec.mamba_type} {spec.shapes} {spec.dtypes}" for spec in specs}))
