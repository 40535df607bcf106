"""config.json read field by field: both rope spellings, windows per layer, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import RopeKind
from worker_service.model.config import parse_model_spec, read_model_spec
from worker_service.model.spec import with_max_model_len

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def fields(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def windows_of(config: dict[str, Any]) -> tuple[int, ...]:
    return tuple(layer.mixer.window_tokens for layer in parse_model_spec(config).layers)


def windows(**changes: Any) -> tuple[int, ...]:
    return windows_of(fields(**changes))


def test_family_comes_from_architectures_not_model_type() -> None:
    config = parse_model_spec(fields(architectures=["Qwen3ForCausalLM"], model_type="llama"))
    mixer = config.layers[0].mixer
    assert config.architecture == "Qwen3ForCausalLM"
    assert mixer.qk_norm
    assert mixer.head_dim == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
    ],
)
def test_both_spellings_of_rope_say_the_same(rope: dict[str, Any]) -> None:
    (config,) = parse_model_spec(fields(**rope)).ropes
    assert config.kind is RopeKind.LLAMA3
    assert (config.theta, config.factor, config.original_max_tokens) == (500000.0, 8.0, 128)


def test_rope_scaling_null_is_the_default() -> None:
    (rope,) = parse_model_spec(fields(rope_scaling=None, rope_theta=1e6)).ropes
    assert rope.kind is RopeKind.DEFAULT


def test_mistral_null_window_sees_everything() -> None:
    assert windows(architectures=["MistralForCausalLM"], sliding_window=None) == (0,) * 4
    assert windows(architectures=["MistralForCausalLM"], sliding_window=32) == (32,) * 4


def test_qwen_windows_need_their_switch() -> None:
    qwen: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 3}
    assert windows(**qwen) == (0,) * 4
    assert windows(**qwen, use_sliding_window=True) == (0, 0, 0, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(**qwen, use_sliding_window=True, layer_types=kinds) == (32, 0, 32, 0)


def test_window_is_found_in_the_nested_text_config() -> None:
    """R46: the top level first, then text_config."""
    nested = {key: value for key, value in BASE.items() if key != "architectures"}
    wrapper = {"architectures": ["MistralForCausalLM"], "text_config": {**nested, "sliding_window": 48}}
    assert windows_of(wrapper) == (48,) * 4
    assert windows_of({**wrapper, "sliding_window": 16}) == (16,) * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("sliding_window", 48), ("num_key_value_heads", 1), ("head_dim", 20), ("rope_theta", 5e5), ("eos_token_id", 7)],
)
def test_a_null_on_top_hides_no_nested_value(name: str, value: Any) -> None:
    nested = {key: field for key, field in BASE.items() if key != "architectures"}
    wrapper: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "text_config": {**nested, name: value}}
    assert parse_model_spec({**wrapper, name: None}) == parse_model_spec(wrapper)
    assert parse_model_spec({**wrapper, name: None}) != parse_model_spec({**wrapper, "text_config": nested})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("changes", "max_model_len"),
    [
        ({}, 512),
        ({"rope_scaling": YARN}, 2048),
        ({"rope_scaling": {**YARN, "factor": 2.5}}, 1280),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": YARN, "max_position_embeddings": 2048}, 2048),
        ({"rope_scaling": YARN, "max_position_embeddings": 2560}, 2560),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 512),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 512),
    ],
)
def test_a_scaled_model_reaches_as_far_as_its_factor(changes: dict[str, Any], max_model_len: int) -> None:
    """Cards say: add the factor, leave max_position_embeddings."""
    assert parse_model_spec(fields(**changes)).max_model_len == max_model_len


def test_a_window_as_long_as_the_model_is_none() -> None:
    assert windows(architectures=["MistralForCausalLM"], sliding_window=512) == (0,) * 4
    spec = parse_model_spec(fields(architectures=["MistralForCausalLM"], sliding_window=500))
    assert {layer.mixer.window_tokens for layer in with_max_model_len(spec, 501).layers} == {500}
    assert {layer.mixer.window_tokens for layer in with_max_model_len(spec, 500).layers} == {0}


def test_eos_of_the_generation_config_wins() -> None:
    assert parse_model_spec(fields(eos_token_id=2)).eos_token_ids == (2,)
    assert parse_model_spec(fields(eos_token_id=2), {"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert parse_model_spec(fields(eos_token_id=2), {"eos_token_id": None}).eos_token_ids == (2,)
    assert parse_model_spec(fields(eos_token_id=0), {"eos_token_id": None}).eos_token_ids == (0,)
    assert parse_model_spec(fields(eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4097}, "num_experts"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9}, "num_local_experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 10**9}, "n_routed_experts"),
        ({"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": "linear"}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "10000"}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ({"rope_scaling": {**YARN, "mscale": "1"}}, "mscale"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, "truncate"),
        ({"rope_scaling": {**YARN, "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": 1e17}}, "factor"),
        ({"max_position_embeddings": 1 << 31}, "max_position_embeddings"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1 << 31}}, "original_max_position_embeddings"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config.quant_method"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "quantization_config.fmt"),
        ({"quantization_config": {**FP8, "activation_scheme": "static"}}, "quantization_config.activation_scheme"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size"),
        ({"quantization_config": {**FP8, "weight_block_size": [128, 0]}}, "quantization_config.weight_block_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"],
            },
            "layer_types",
        ),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_spec(fields(**changes))
    assert caught.value.field == field


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_unreadable_config_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_model_spec(tmp_path)
    assert caught.value.field == "config.json"
    assert str(tmp_path) not in str(caught.value)
