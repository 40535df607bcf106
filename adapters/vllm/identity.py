"""What must agree before two engines may exchange pages, and what the connector refuses to start with.

vLLM's block hashes name tokens, salt, LoRA adapter and pictures. The fingerprint names all else that decides a page's
bytes: weights, dtype, layout, how the hashes are seeded, groups, parallelism, and what computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adapters.vllm.layout import Layout
from adapters.weights import Refused, files_digest

# Their digests have 32 bytes, as page ids have. vLLM's others have fewer, and are not safe against made collisions.
HASH_ALGORITHMS = ("sha256", "sha256_cbor")
_TAG = b"stemcache vllm 1"


def check_config(config: Any) -> None:
    """Raises Refused for what the connector cannot serve."""
    transfer, cache, parallel = config.kv_transfer_config, config.cache_config, config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise Refused(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}; it must be 'recompute': with any other "
            "one a page that left the store between lookup and load fails the request instead of being computed"
        )
    if not cache.enable_prefix_caching:
        raise Refused("enable_prefix_caching is off; pages are named by its block hashes")
    if cache.prefix_caching_hash_algo not in HASH_ALGORITHMS:
        raise Refused(f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo!r}; must be in {HASH_ALGORITHMS}")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise Refused(f"{name} is {getattr(parallel, name)}; must be 1: pages of the ranks would differ")
    speculative = config.speculative_config
    if speculative is not None and speculative.use_eagle():
        raise Refused(
            f"speculative_config.method is {speculative.method!r}; a draft layer's keys at a page's last token "
            "depend on the token after it, which the page's hash does not name"
        )


def fingerprint(config: Any, layout: Layout, hash_seed: str, weights: bytes, platform: Iterable[str]) -> bytes:
    """Returns 32 bytes. `weights`: see `weights_identity`; `platform`: versions and device that round."""
    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    facts: dict[str, object] = {
        "weights": weights.hex(),
        "config": _plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": cache.cache_dtype,
        "layout": layout.name,
        "page_tokens": layout.page_tokens,
        "hash": [cache.prefix_caching_hash_algo, hash_seed],
        "groups": [
            [str(group.kind), group.window_tokens, list(group.layers), group.content] for group in layout.groups
        ],
        "ranks": config.parallel_config.tensor_parallel_size,
        "lookahead": 0 if speculative is None else speculative.num_speculative_tokens,
        "platform": list(platform),
    }
    packed = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(_TAG + packed).digest()


# Fields of a model's config that say where or by what it was written, not what the model is.
_INCIDENTAL = ("_name_or_path", "transformers_version", "_commit_hash")


def _plain(value: Any) -> Any:
    """Returns the value as JSON has it; its text where JSON has no form for it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items() if name not in _INCIDENTAL}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def weights_identity(model: Any, load_format: str, given: str) -> bytes:
    """Returns what names the weights: `given` if any, the digest of a folder's files, or the hub's name and commit.

    Raises Refused where a name could mean other weights tomorrow.
    """
    if given:
        return b"given:" + bytes.fromhex(given)
    if load_format == "dummy":
        return b"dummy:%d" % model.seed
    folder = Path(model.model)
    if folder.is_dir():
        return b"files:" + files_digest(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise Refused(
            f"the commit of model {model.model!r} is not known, so its name may mean other weights later: set "
            "kv_connector_extra_config.model_digest to a hexadecimal name for these weights"
        )
    return f"hub:{model.model}@{commit}".encode()
