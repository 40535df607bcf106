"""What can be known before anything starts: settings, packages, the model's folder, the device.

Asks no network and takes well under a second, but for the content of a model's folder: reading its config.json imports
PyTorch, which takes some two.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cache_service.config import load_config as load_cache_config
from cli.addresses import CannotStart
from cli.devices import has_gpu
from rpc.settings import SettingsError

# Ids without an owner are of the hub's first years (gpt2), and of models that no worker serves.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# A worker with a small model serves after some ten seconds; this long, and it hangs.
WORKER_START_S = 300.0
# Large weights take longer: 140 GB from such a disk 23 minutes.
SLOW_DISK_BYTES_PER_S = 100e6
DOWNLOAD_S = 4 * 3600.0


def check_packages() -> None:
    """Raises CannotStart where workers cannot run, as in the cache service's image."""
    missing = [name for name in ("worker_service", "torch", "safetensors", "tokenizers") if _is_missing(name)]
    if missing:
        raise CannotStart(f"no workers here: {', '.join(missing)} not installed; `pip install 'stemcache[worker]'`")


def check_cache_settings(environ: Mapping[str, str]) -> None:
    try:
        load_cache_config([], environ)
    except SettingsError as error:
        raise CannotStart(_named("STEMCACHE_CACHE_", error)) from None


def check_worker_settings(environ: Mapping[str, str]) -> None:
    from worker_service.config import load_config

    try:
        load_config([], environ)
    except SettingsError as error:
        raise CannotStart(_named("STEMCACHE_WORKER_", error)) from None


def check_device(device: str) -> None:
    if device != "cuda":
        return
    if not has_gpu():
        raise CannotStart("--device cuda: no NVIDIA GPU is here (no /dev/nvidia0); --device auto takes the CPU")
    if version("torch").endswith("+cpu"):
        raise CannotStart(f"--device cuda: PyTorch {version('torch')} is a build for CPUs; install one with CUDA")


def check_model(model: str) -> None:
    """Checks a folder's content, or a hub id's form. Raises CannotStart, which names the folder."""
    folder = Path(model)
    if not folder.is_dir():
        if folder.exists() or model.startswith(("/", ".", "~")) or not HUB_ID.fullmatch(model):
            raise CannotStart(f"--model {model}: there is no such folder, and it is no hub id (owner/name) either")
        return
    from worker_service.core.errors import ModelError
    from worker_service.model.config import read_model_spec

    try:
        read_model_spec(folder)
    except ModelError as error:
        raise CannotStart(f"--model {folder}: {error}") from None
    if not (folder / "tokenizer.json").is_file():
        raise CannotStart(f"--model {folder}: tokenizer.json is not in the folder")
    if not any(folder.glob("*.safetensors")):
        raise CannotStart(f"--model {folder}: no *.safetensors is in the folder")


def weights_bytes(model: str) -> int:
    """Returns the bytes to be read from the folder; 0 where that is not known yet."""
    folder = Path(model)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0


def start_limit_s(model: str) -> float:
    """Returns how long a worker may take until it serves, in seconds. A hub id's weights may have to come first."""
    if not Path(model).is_dir():
        return DOWNLOAD_S
    return WORKER_START_S + weights_bytes(model) / SLOW_DISK_BYTES_PER_S


def _named(prefix: str, error: SettingsError) -> str:
    """Returns the error with the variable in place of the field's name, which a person does not know."""
    return str(error) if error.key.startswith(prefix) else f"{prefix}{error.key.upper()}: {error.reason}"


def _is_missing(name: str) -> bool:
    try:
        if importlib.util.find_spec(name) is None:
            return True
        return name == "torch" and not version(name)
    except (ValueError, PackageNotFoundError):
        return True
