"""What must agree before two engines may exchange pages, and what the linker refuses to start with.

SGLang's page hashes name tokens, salt, LoRA adapter and other extra keys. The fingerprint names all else that decides
a page's bytes: weights, dtype, layout, parallelism and rank, and what computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from adapters.sglang.device_pools import POOLS, DevicePool
from adapters.weights import Refused, files_digest
from tier_client.values import fingerprint_of

ENGINE = "sglang"
PAGE_HASHES = "sha256 chain of storage_namespace_seed"
# Ranks that split layers, requests or tokens: the fingerprint tells tensor-parallel ranks apart, not these.
PARALLEL = ("pp_size", "dp_size", "attn_cp_size", "dcp_size")


def check_config(server_args: Any, params: Any, components: Collection[str]) -> None:
    """Raises Refused for what the linker cannot serve. `params`: SGLang's of the cache, which say how many ranks share
    a token's keys; `components`: names of its tree components."""
    if frozenset(components) not in POOLS:
        raise Refused(
            f"the model has {', '.join(sorted(components))} layers; of these the linker serves FULL, SWA, MAMBA"
        )
    if params.is_eagle or getattr(server_args, "speculative_algorithm", None):
        raise Refused("speculative_algorithm is set; a draft model's pages are in another pool, which is not saved")
    for name in PARALLEL:
        for given in (server_args, params):
            if getattr(given, name, 1) != 1:
                raise Refused(f"{name} is {getattr(given, name)}; must be 1")


def fingerprint(
    server_args: Any, pools: Sequence[DevicePool], rank: int, model_digest: str, platform: Iterable[str]
) -> bytes:
    """Returns 32 bytes. `platform`: versions and device that round. A rank's pages are its own.

    Raises Refused where a name could mean other weights tomorrow.
    """
    return fingerprint_of(
        {
            "engine": ENGINE,
            "page_hashes": PAGE_HASHES,
            "weights": model_digest or folder_digest(server_args.model_path),
            "dtype": server_args.dtype,
            "kv_cache_dtype": server_args.kv_cache_dtype,
            "quantization": server_args.quantization,
            "layout": [[pool.name, sorted(pool.layers.items()), pool.pages.layout] for pool in pools],
            "page_bytes": [pool.pages.page_bytes for pool in pools],
            "rank": f"{rank} of {server_args.tp_size}",
            "platform": list(platform),
        }
    )


def folder_digest(model_path: str) -> str:
    """Returns a digest of the weights and the config in a folder. Raises Refused where it has none."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise Refused(
            f"model_path {model_path!r} is no folder, so its name may mean other weights later: set "
            "model_digest in our configuration to a hexadecimal name for these weights"
        )
    config = folder / "config.json"
    return files_digest(folder).hex() + (config.read_text() if config.is_file() else "")
