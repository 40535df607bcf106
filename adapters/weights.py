"""A digest of the weights that an engine loads from a folder."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
READ_BYTES = 4 << 20


class Refused(ValueError):
    """The engine must not start with our plug-in; the text names the option."""


def files_digest(folder: Path) -> bytes:
    """Returns a digest of the weight files' names and contents. Raises Refused where there is none."""
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    if not files:
        raise Refused(f"no weights in the model's folder {folder.name!r}: set model_digest")
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
