"""A config's rotary embeddings, in both spellings: `rope_parameters` has all of it, `rope_scaling` stands beside a
top-level `rope_theta`."""

from __future__ import annotations

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import RopeConfig, RopeKind
from worker_service.model.fields import MOST_WHOLE, Fields, flag, number, one_of, whole

KINDS = {kind.value: kind for kind in RopeKind}


def read_rope(fields: Fields, max_tokens: int) -> RopeConfig:
    """Returns the one rope of all layers."""
    rope = rope_parameters(fields)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("rope_parameters", "must be the same for all layers")
    return rope_of(rope, _theta(fields), max_tokens)


def read_ropes(fields: Fields, kinds: tuple[str, ...], max_tokens: int) -> dict[str, RopeConfig] | None:
    """Returns the rope of each kind of layer where `rope_parameters` names the kinds, else None."""
    rope = rope_parameters(fields)
    if not all(isinstance(rope.get(kind), dict) for kind in kinds):
        return None
    return {kind: rope_of(rope[kind], _theta(fields), max_tokens) for kind in kinds}


def rope_of(rope: Fields, default_theta: float, max_tokens: int) -> RopeConfig:
    name = "type" if "rope_type" not in rope and "type" in rope else "rope_type"
    try:
        kind: RopeKind = one_of(rope, name, KINDS, "default")
    except ModelError as error:
        raise ModelError("rope_type", error.reason) from error
    base = RopeConfig(kind, number(rope, "rope_theta", default_theta))
    return base if kind is RopeKind.DEFAULT else _scaled(rope, base, max_tokens)


def rotary_dim(fields: Fields, head_dim: int) -> int:
    """Returns how many elements of a head are rotated: a share, `partial_rotary_factor`, in families that have it."""
    rope = fields.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = fields.get("partial_rotary_factor") if share is None else share
    share = 1.0 if share is None else share
    is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    turned = int(head_dim * share) if is_share else 0
    if not turned or turned % 2:
        raise ModelError("partial_rotary_factor", f"{share!r} turns {turned} of the {head_dim} elements of a head")
    return turned


def reach(rope: RopeConfig, max_tokens: int) -> int:
    """Returns the most positions that the model can serve.

    Model cards tell people to add a YaRN or linear factor and to leave max_position_embeddings as it was trained, so
    the factor may reach further than that field says. The dynamic kind stays at its trained length: beyond it every
    key would change as the sequence grows, and a cached key must not.
    """
    if rope.kind not in (RopeKind.YARN, RopeKind.LINEAR):
        return max_tokens
    scaled = rope.original_max_tokens * rope.factor
    if scaled > MOST_WHOLE:
        raise ModelError("factor", f"{rope.factor:g} times {rope.original_max_tokens} tokens are too many positions")
    return max(max_tokens, int(scaled))


def rope_parameters(fields: Fields) -> Fields:
    """Returns what the file says of its rotary embeddings, in either spelling; empty where it says nothing."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(name) or {}
    if not isinstance(rope, dict):
        raise ModelError(name, f"must be an object, not {rope!r}")
    return rope


def _theta(fields: Fields) -> float:
    return number(fields, "rope_theta", 10000.0)


def _scaled(rope: Fields, base: RopeConfig, max_tokens: int) -> RopeConfig:
    llama3 = base.kind is RopeKind.LLAMA3
    attention_factor = rope.get("attention_factor")
    return RopeConfig(
        kind=base.kind,
        theta=base.theta,
        factor=number(rope, "factor"),
        original_max_tokens=whole(rope, "original_max_position_embeddings", max_tokens),
        low_freq_factor=number(rope, "low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=number(rope, "high_freq_factor", None if llama3 else 4.0),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        attention_factor=None if attention_factor is None else number(rope, "attention_factor"),
        mscale=number(rope, "mscale") if rope.get("mscale") else 0.0,
        mscale_all_dim=number(rope, "mscale_all_dim") if rope.get("mscale_all_dim") else 0.0,
        truncate=flag(rope, "truncate", True),
    )
