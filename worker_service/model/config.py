"""The fields of a Hugging Face config.json that serving needs, checked once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from worker_service.core.errors import ModelError

Fields = Mapping[str, Any]


class Family(Enum):
    LLAMA = "LlamaForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    MISTRAL = "MistralForCausalLM"


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: Family
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]  # per layer; 0 = the layer sees everything
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]


def read_model_config(folder: Path) -> ModelConfig:
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_model_config(fields, read_json(generation) if generation.is_file() else {})


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(path.name, f"is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ModelError(path.name, "must be a JSON object")
    return fields


def parse_model_config(top_fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Returns the checked config.

    A multimodal wrapper has the language model's fields in `text_config`; the top level wins.
    """
    family = _family(top_fields)
    fields = _merged(top_fields)
    num_layers = _whole(fields, "num_hidden_layers")
    num_heads = _whole(fields, "num_attention_heads")
    hidden_size = _whole(fields, "hidden_size")
    max_tokens = _whole(fields, "max_position_embeddings")
    _check_plain(fields)
    rope = _rope(fields, max_tokens)
    attention_bias = bool(fields.get("attention_bias", False))
    config = ModelConfig(
        family=family,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        vocab_size=_whole(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_whole(fields, "num_key_value_heads", num_heads),
        head_dim=_head_dim(fields, family, hidden_size, num_heads),
        max_model_len=_max_model_len(rope, max_tokens),
        norm_eps=_number(fields, "rms_norm_eps"),
        rope=rope,
        windows=_windows(fields, family, num_layers),
        qkv_bias=family is Family.QWEN2 or (family is not Family.MISTRAL and attention_bias),
        output_bias=family in (Family.LLAMA, Family.QWEN3) and attention_bias,
        mlp_bias=family is Family.LLAMA and bool(fields.get("mlp_bias", False)),
        qk_norm=family is Family.QWEN3,
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(fields, generation or {}),
    )
    _check_heads(config)
    return config


def _merged(fields: Fields) -> Fields:
    """The top level's fields over those of `text_config`; a null says nothing where the nested config has a value."""
    nested = fields.get("text_config")
    if not isinstance(nested, dict):
        return fields
    said = {name: value for name, value in fields.items() if value is not None or nested.get(name) is None}
    return {**nested, **said}


def _max_model_len(rope: RopeConfig, max_tokens: int) -> int:
    """The most positions that the model can serve.

    Model cards tell people to add a YaRN or linear factor and to leave max_position_embeddings as it was trained, so
    the factor may reach further than that field says. The dynamic kind stays at its trained length: beyond it every
    key would change as the sequence grows, and a cached key must not.
    """
    if rope.kind not in (RopeKind.YARN, RopeKind.LINEAR):
        return max_tokens
    return max(max_tokens, int(rope.original_max_tokens * rope.factor))


def _family(fields: Fields) -> Family:
    """By `architectures`: several families share one `model_type`."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("architectures", f"must be a list with one name, not {names!r}")
    for family in Family:
        if names[0] == family.value:
            return family
    raise ModelError("architectures", f"{names[0]!r} is not supported; {', '.join(f.value for f in Family)} are")


def _whole(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(name, f"must be a whole number of at least 1, not {value!r}")
    return value


def _number(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(name, f"must be a number above 0, not {value!r}")
    return float(value)


def _check_plain(fields: Fields) -> None:
    """What would load and then compute something else."""
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError("hidden_act", f"{fields['hidden_act']!r} is not supported; 'silu' is")
    if fields.get("quantization_config"):
        raise ModelError("quantization_config", "quantised checkpoints are not supported")


def _check_heads(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            "num_key_value_heads", f"{config.num_kv_heads} does not divide num_attention_heads {config.num_heads}"
        )
    if config.head_dim % 2:
        raise ModelError("head_dim", f"must be even for rotary embeddings, not {config.head_dim}")


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is not None:
        return _whole(fields, "head_dim")
    if family is Family.QWEN3:
        return 128
    if hidden_size % num_heads:
        raise ModelError("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    return hidden_size // num_heads


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Each layer's sliding window. Qwen has a switch and mixes layers; Mistral's null means that nothing slides."""
    if family is Family.LLAMA:
        return (0,) * num_layers
    if family is Family.MISTRAL:
        window = 0 if fields.get("sliding_window", 4096) is None else _whole(fields, "sliding_window", 4096)
        return (window,) * num_layers
    if not fields.get("use_sliding_window", False) or fields.get("sliding_window") is None:
        return (0,) * num_layers
    window = _whole(fields, "sliding_window")
    return tuple(window if sliding else 0 for sliding in _sliding_layers(fields, num_layers))


def _sliding_layers(fields: Fields, num_layers: int) -> list[bool]:
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError("max_window_layers", f"must be a whole number, not {first!r}")
        return [layer >= first for layer in range(num_layers)]
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError("layer_types", f"must name {' or '.join(known)} for each of the {num_layers} layers")
    return [known[kind] for kind in kinds]


def _rope(fields: Fields, max_tokens: int) -> RopeConfig:
    """Both spellings: `rope_parameters` holds all of it, `rope_scaling` is beside a top-level `rope_theta`."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError("rope_parameters", f"must be an object, not {rope!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("rope_parameters", "must be the same for all layers")
    name = rope.get("rope_type", rope.get("type", "default"))
    try:
        kind = RopeKind(name)
    except ValueError as error:
        raise ModelError(
            "rope_type", f"{name!r} is not supported; {', '.join(k.value for k in RopeKind)} are"
        ) from error
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError("partial_rotary_factor", f"{partial!r} is not supported; 1.0 is")
    theta = rope.get("rope_theta")
    config = RopeConfig(kind, float(theta) if theta else _number(fields, "rope_theta", 10000.0))
    return config if kind is RopeKind.DEFAULT else _scaled_rope(rope, config, max_tokens)


def _scaled_rope(rope: Fields, base: RopeConfig, max_tokens: int) -> RopeConfig:
    llama3 = base.kind is RopeKind.LLAMA3
    attention_factor = rope.get("attention_factor")
    return RopeConfig(
        kind=base.kind,
        theta=base.theta,
        factor=_number(rope, "factor"),
        original_max_tokens=_whole(rope, "original_max_position_embeddings", max_tokens),
        low_freq_factor=_number(rope, "low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", None if llama3 else 4.0),
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        attention_factor=None if attention_factor is None else _number(rope, "attention_factor"),
        mscale=float(rope.get("mscale") or 0.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        truncate=bool(rope.get("truncate", True)),
    )


def _eos_token_ids(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """The generation config's, else the config's; null in either says nothing."""
    value = generation.get("eos_token_id")
    if value is None:
        value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ModelError("eos_token_id", f"must be token ids, not {value!r}")
    return tuple(ids)
