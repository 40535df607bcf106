"""What engines must have in common to share pages, and what the connector refuses to start with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.vllm.identity import check_config, fingerprint, weights_identity
from adapters.vllm.layout import GroupLayout, Layout, read_layout
from adapters.vllm.settings import Settings
from adapters.weights import Refused, files_digest
from session.words import GroupKind

LAYOUT = Layout("LBHNC", 16, 100, (GroupLayout(GroupKind.FULL, 0, ("a", "b"), (64, 64)),))


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, object]:
        return {**vars(self), "_name_or_path": "/somewhere"}


def config(**changes: Any) -> Any:
    """Of a plain model; `changes` name a part and a field: model__dtype="float16"."""
    parts = {
        "kv_transfer": {"kv_load_failure_policy": "recompute"},
        "cache": {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256", "cache_dtype": "auto"},
        "parallel": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "model": {"dtype": "bfloat16", "quantization": None, "hf_config": HfConfig(rope_theta=10_000.0), "seed": 0},
    }
    speculative = changes.pop("speculative", None)
    for name, value in changes.items():
        part, field = name.split("__")
        parts[part][field] = value
    made = {f"{name}_config": SimpleNamespace(**fields) for name, fields in parts.items()}
    return SimpleNamespace(**made, speculative_config=speculative)


def speculative(method: str, tokens: int = 3) -> Any:
    return SimpleNamespace(method=method, num_speculative_tokens=tokens, use_eagle=lambda: method == "eagle")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_transfer__kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"cache__enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"cache__prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo"),
        ({"parallel__pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"speculative": speculative("eagle")}, "speculative_config.method"),
    ],
)
def test_refusals_name_the_option(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        check_config(config(**changes))


def test_the_refusal_of_a_policy_says_why() -> None:
    with pytest.raises(Refused, match=r"must be 'recompute'.*fails the request"):
        check_config(config(kv_transfer__kv_load_failure_policy="fail"))


def test_plain_and_ngram_engines_start() -> None:
    check_config(config())
    check_config(config(speculative=speculative("ngram")))


def digest(
    layout: Layout = LAYOUT, seed: str = "s", weights: bytes = b"w", platform: str = "cpu", **changes: Any
) -> bytes:
    return fingerprint(config(**changes), layout, seed, weights, (platform,))


def test_equal_engines_have_equal_fingerprints_wherever_their_files_are() -> None:
    elsewhere = HfConfig(rope_theta=10_000.0, transformers_version="9", _commit_hash="c")
    assert digest() == digest() == digest(model__hf_config=elsewhere)
    assert len(digest()) == 32


GROUP = LAYOUT.groups[0]
OTHERS: dict[str, Callable[[], bytes]] = {
    "weights": lambda: digest(weights=b"x"),
    "hash seed": lambda: digest(seed="t"),
    "hash algorithm": lambda: digest(cache__prefix_caching_hash_algo="sha256_cbor"),
    "platform": lambda: digest(platform="cuda"),
    "dtype": lambda: digest(model__dtype="float16"),
    "cache dtype": lambda: digest(cache__cache_dtype="fp8"),
    "rope": lambda: digest(model__hf_config=HfConfig(rope_theta=500_000.0)),
    "quantization": lambda: digest(model__quantization="awq"),
    "tensor parallel": lambda: digest(parallel__tensor_parallel_size=2),
    "lookahead": lambda: digest(speculative=speculative("ngram")),
    "block size": lambda: digest(LAYOUT._replace(page_tokens=32)),
    "layout": lambda: digest(LAYOUT._replace(name="BLHNC")),
    "layers": lambda: digest(LAYOUT._replace(groups=(GROUP._replace(layers=("a", "c")),))),
    "window": lambda: digest(LAYOUT._replace(groups=(GROUP._replace(kind=GroupKind.WINDOW, window_tokens=9),))),
}


def test_whatever_decides_a_pages_bytes_is_in_the_fingerprint() -> None:
    found = {name: make() for name, make in OTHERS.items()}
    assert len({*found.values(), digest()}) == len(OTHERS) + 1, found


def test_weights_are_named_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"one")
    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    model = SimpleNamespace(model=str(tmp_path), hf_config=HfConfig(), seed=0)
    before = weights_identity(model, "auto", "")
    (tmp_path / "README.md").write_text("of no consequence")
    assert weights_identity(model, "auto", "") == before
    (tmp_path / "model-2.safetensors").write_bytes(b"twO")
    assert weights_identity(model, "auto", "") != before
    assert weights_identity(model, "auto", "ab") == b"given:\xab"
    assert weights_identity(model, "dummy", "") == b"dummy:0"


def test_a_folder_without_weights_and_a_name_without_a_commit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="model_digest"):
        files_digest(tmp_path)
    hub = SimpleNamespace(model="org/name", hf_config=HfConfig(), seed=0)
    with pytest.raises(Refused, match="model_digest"):
        weights_identity(hub, "auto", "")
    hub.hf_config._commit_hash = "abc"
    assert weights_identity(hub, "auto", "") == b"hub:org/name@abc"


# Layouts.


def spec(kind: str, block_size: int = 16, **more: object) -> Any:
    return SimpleNamespace(kind=kind, block_size=block_size, real_page_size_bytes=64, **more)


def kv_cache(*specs: Any, hash_block_size: int | None = None, cacheable: int | None = None) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=one, layer_names=[f"{n}.b", f"{n}.a"]) for n, one in enumerate(specs)]
    ids = tuple(range(len(specs) if cacheable is None else cacheable))
    return SimpleNamespace(
        kv_cache_groups=groups,
        hash_block_size=hash_block_size,
        num_blocks=10,
        kv_cache_layout="LBHNC",
        prefix_cacheable_group_ids=ids,
    )


def read(given: Any) -> Layout:
    return read_layout(given, lambda one: str(one.kind), lambda one: (one,))


def state(**changes: object) -> Any:
    fields = {"mamba_cache_mode": "align", "num_speculative_blocks": 0, "mamba_type": "m", "dtypes": ("fp32",)}
    return spec("mamba", shapes=((2, 8),), **{**fields, **changes})


def test_recurrent_states_are_read_with_what_they_are() -> None:
    found = [read(kv_cache(spec("full_attention"), one)) for one in (state(), state(), state(dtypes=("bf16",)))]
    assert [group.kind for group in found[0].groups] == [GroupKind.FULL, GroupKind.STATE]
    assert digest(found[0]) == digest(found[1]) != digest(found[2]), "of one size, and still not the same"


def test_full_and_window_groups_are_read() -> None:
    found = read(kv_cache(spec("sliding_window", sliding_window=64), spec("mla_attention")))
    assert [(group.kind, group.window_tokens) for group in found.groups] == [
        (GroupKind.WINDOW, 64),
        (GroupKind.FULL, 0),
    ]
    assert found.groups[0].layers == ("0.a", "0.b") and found.groups[0].page_bytes == 128
    assert not found.is_one_full_group and read(kv_cache(spec("full_attention"))).is_one_full_group


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (kv_cache(), "no KV cache group"),
        (kv_cache(state(mamba_cache_mode="all")), "mamba_cache_mode 'all'"),
        (kv_cache(state(num_speculative_blocks=1)), "speculative_config"),
        (kv_cache(spec("chunked_local_attention")), "chunked_local_attention"),
        (kv_cache(spec("sliding_window")), "sliding_window"),
        (kv_cache(spec("full_attention"), spec("full_attention", 32)), "group 1 has blocks of 32 tokens"),
        (kv_cache(spec("full_attention"), hash_block_size=8), "block hashes are of 8"),
        (kv_cache(spec("full_attention"), spec("full_attention"), cacheable=1), "group 1 .* has no prefix cache"),
    ],
)
def test_groups_without_a_rule_are_refused(given: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(given)


# Settings.


def test_settings_have_defaults() -> None:
    assert Settings.read({}) == Settings()
    assert Settings.read({"cache": "c:1", "call_timeout_s": 1}).call_timeout_s == 1


def test_times_and_sizes_reach_the_client() -> None:
    given = {"call_timeout_s": 1, "store_timeout_s": 2, "transfer_timeout_s": 3, "pause_s": 4, "host_part_kb": 5}
    config = Settings.read(given).client_config(engine="e", model="m", fingerprint=bytes(32), page_tokens=16, groups=())
    times = (config.call_timeout_s, config.store_timeout_s, config.transfer_timeout_s, config.pause_s)
    assert (*times, config.part_bytes) == (1, 2, 3, 4, 5 << 10)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cash": "c:1"}, "cash: unknown"),
        ({"cache": 1}, "cache: must be of type str"),
        ({"load_threads": True}, "load_threads: must be of type int"),
        ({"load_threads": 0}, "load_threads: must be positive"),
        ({"inline_wait_s": -1.0}, "inline_wait_s: must not be negative"),
        ({"model_digest": "xy"}, "model_digest: must be hexadecimal"),
    ],
)
def test_settings_that_are_wrong_are_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Settings.read(given)
