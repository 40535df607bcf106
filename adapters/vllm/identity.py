"""What must agree before two engines may exchange pages, and what the connector refuses to start with.

vLLM's block hashes name tokens, salt, LoRA adapter and pictures. The fingerprint names all else that decides a page's
bytes: weights, dtype, layout, how the hashes are seeded, groups, parallelism, and what computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from adapters.vllm.layout import Layout

# Their digests have 32 bytes, as page ids have. vLLM's others have fewer, and are not safe against made collisions.
HASH_ALGORITHMS = ("sha256", "sha256_cbor")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
READ_BYTES = 4 << 20
_TAG = b"stemcache vllm 1"


class Refused(ValueError):
    """The engine must not start with this connector; the text names the option."""


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
        "groups": [[str(group.kind), group.window_tokens, list(group.layers)] for group in layout.groups],
        "ranks": config.parallel_config.tensor_parallel_size,
        "lookahead": 0 if speculative is None else speculative.num_speculative_tokens,
        "platform": list(platform),
    }
    packed = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(_TAG + packed).digest()


# Fields of a model's config that say where or by what it was written, not what the model is.
_INCIDENTAL = ("_name_or_path", "transformers_version", "_commit_hash")


def _plain(value: Any) -> Any:
    """As JSON has it; what JSON does not know by its text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items() if name not in _INCIDENTAL}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def weights_identity(model: Any, load_format: str, given: str) -> bytes:
    """What names the weights: `given` if any, the digest of a folder's files, or the hub's name and commit.

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


def files_digest(folder: Path) -> bytes:
    """Of names and contents of the weight files. Raises Refused where there is none."""
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    if not files:
        raise Refused(f"no weights in the model's folder {folder.name!r}: set kv_connector_extra_config.model_digest")
    with ThreadPoolExecutor(min(8, len(files))) as pool:
        digests = list(pool.map(_file_digest, files))
    whole = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        whole.update(len(path.name.encode()).to_bytes(4, "little") + path.name.encode() + digest)
    return whole.digest()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.digest()
