"""Settings of the worker: where they come from, and what is said about a wrong one."""

from __future__ import annotations

import pytest

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.prefill_attention.segments import check_segment_tokens
from rpc.settings import SettingsError, describe
from worker_service import config
from worker_service.config import load_config
from worker_service.model import device
from worker_service.model.gemm_dispatch import Invariance


def test_flags_win_over_the_environment_and_that_over_the_defaults() -> None:
    environment = {"STEMCACHE_WORKER_MODEL": "m", "STEMCACHE_WORKER_TOKEN_BUDGET": "99", "HOME": "/"}
    config = load_config(["--token-budget", "64", "--chunked-prefill", "off"], environment)
    assert (config.model, config.token_budget, config.chunked_prefill, config.page_tokens) == ("m", 64, False, 0)


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        ([], {}, "model"),
        ([], {"STEMCACHE_WORKER_MODEL": ""}, "model"),
        (["--model", "m", "--no-such", "1"], {}, "--no-such"),
        ([], {"STEMCACHE_WORKER_MODLE": "m"}, "STEMCACHE_WORKER_MODLE"),
        (["--model", "m", "--page-tokens", "-1"], {}, "--page-tokens"),
        (["--model", "m", "--page-tokens", "sixteen"], {}, "--page-tokens"),
        (["--model", "m", "--threads", "1025"], {}, "--threads: must be between 0 and 1024"),
        (["--model", "m", "--max-num-seqs", "4097"], {}, "--max-num-seqs: must be between 1 and 4096"),
        (["--model", "m", "--pool-mb", str((1 << 30) + 1)], {}, "--pool-mb"),
        (["--model", "m", "--pool-pages", str(1 << 31)], {}, "--pool-pages"),
        (["--model", "m", "--max-model-len", "1"], {}, "max_model_len: must be 0 or at least 2"),
        (["--model", "m", "--memory-fraction", "nan"], {}, "--memory-fraction"),
        (["--model", "m", "--memory-fraction", "1.5"], {}, "--memory-fraction"),
        (["--model", "m", "--device", "tpu"], {}, "--device"),
        (["--model", "m", "--host-tier", "redis"], {}, "redis_url"),
        (["--model", "m", "--redis-url", "redis://h"], {}, "redis_url"),
        (["--model", "m", "--host-tier", "redis", "--redis-url", "http://h"], {}, "redis_url"),
        (["--model", "m", "--cache", "nowhere"], {}, "cache"),
        (["--model", "m", "--listen", "host:99999"], {}, "listen"),
        (["--model", "m", "--invariance", "always"], {}, "--invariance"),
        (["--model", "m", "--kv-dtype", "fp8"], {}, "--kv-dtype"),
        (["--model", "m", "--cuda-graphs", "perhaps"], {}, "--cuda-graphs"),
        (["--model", "m", "--attention-segment-tokens", "-128"], {}, "--attention-segment-tokens"),
        (["--model", "m", "--attention-segment-tokens", "2048"], {}, "attention_segment_tokens"),
        ([], {"STEMCACHE_WORKER_MODEL": "m", "STEMCACHE_WORKER_ATTENTION_SEGMENT_TOKENS": "8200"}, "multiple of 128"),
    ],
)
def test_a_wrong_setting_is_named(arguments: list[str], environment: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(arguments, environment)
    assert named in str(error.value)


@pytest.mark.parametrize("tokens", [0, 127, 128, 4095, 4096, 4097, 4224, 8192])
def test_segments_of_attention_are_what_the_kernel_takes(tokens: int) -> None:
    try:
        check_segment_tokens(tokens)
    except KernelArgumentError:
        with pytest.raises(SettingsError, match="attention_segment_tokens: must be 0 or a multiple"):
            load_config(["--model", "m", "--attention-segment-tokens", str(tokens)], {})
    else:
        config = load_config(["--model", "m", "--attention-segment-tokens", str(tokens)], {})
        assert describe(config)["attention_segment_tokens"] == str(tokens)
    assert load_config(["--model", "m"], {}).attention_segment_tokens == 0


def test_choices_are_those_that_a_model_takes() -> None:
    """Settings are read before PyTorch is imported, so they name what a model knows a second time."""
    assert ("auto", *device.KV_DTYPES) == config.KV_DTYPES
    assert ("auto", *device.DTYPES) == config.DTYPES
    assert config.EXPERT_WEIGHTS == device.EXPERT_WEIGHTS
    assert set(config.INVARIANCES) == {invariance.value for invariance in Invariance}
    assert set(config.BACKENDS) <= {backend.value for backend in Backend}


def test_bits_depend_on_no_other_request_unless_speed_is_asked_for() -> None:
    assert load_config(["--model", "m"], {}).invariance == "batch"
    assert load_config(["--model", "m", "--invariance", "fast"], {}).invariance == "fast"


def test_experts_stay_stored_unless_told_otherwise() -> None:
    assert load_config(["--model", "m"], {}).expert_weights == "stored"
    assert load_config(["--model", "m", "--expert-weights", "dequantised"], {}).expert_weights == "dequantised"
    with pytest.raises(SettingsError, match="expert-weights"):
        load_config(["--model", "m", "--expert-weights", "bf16"], {})


def test_describe_tells_the_kernel_backend() -> None:
    """Describe's config is this mapping."""
    assert describe(load_config(["--model", "m"], {}))["kernel_backend"] == "auto"
    assert describe(load_config(["--model", "m", "--kernel-backend", "reference"], {}))["kernel_backend"] == "reference"
    with pytest.raises(SettingsError, match="kernel-backend"):
        load_config(["--model", "m", "--kernel-backend", "triton"], {})


def test_no_secret_is_shown() -> None:
    url = "redis://user:hush-hush@host:1234/2"
    config = load_config(["--model", "m", "--host-tier", "redis", "--redis-url", url], {})
    shown = describe(config)
    assert "hush" not in str(shown)
    assert "host:1234" in shown["redis_url"]
