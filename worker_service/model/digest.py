"""A model's identity as 32 bytes: over its config, tokenizer and weights, never over a path or a name.

Each file is cut into pieces of PIECE_BYTES and its hash is over their hashes, so that one large file keeps as many
threads busy as many small ones.

    model = SHA-256(tag | SHA-256(config) | number of files | file | file ...)    tokenizer first, then weights by name
    file  = SHA-256(length in bytes | SHA-256(piece) | SHA-256(piece) ...)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from worker_service.core.errors import ModelError
from worker_service.model.checkpoint_files import weight_files
from worker_service.model.fields import read_json
from worker_service.model.tokenizer import TOKENIZER

T = TypeVar("T")

TAG = b"stemcache model 2"
# Fields of config.json that say where or by what it was written, not what the model is.
INCIDENTAL_FIELDS = ("_name_or_path", "transformers_version")
PIECE_BYTES = 64 << 20
READ_BYTES = 4 << 20
MAX_THREADS = 8


def model_digest(folder: Path) -> bytes:
    with digesting(folder) as digest:
        return digest()


@contextmanager
def digesting(folder: Path) -> Iterator[Callable[[], bytes]]:
    """Threads hash the folder's files meanwhile; the call that is handed over waits for the digest.

    Beside a load of the same files each is read from the disk once: the second reader finds it in the page cache.
    """
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="digest") as pool:
        try:
            files = [folder / TOKENIZER, *(folder / name for name in weight_files(folder))]
            pending = [_start(path, pool) for path in files]
            yield lambda: _digest(folder, pending)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start(path: Path, pool: ThreadPoolExecutor) -> tuple[int, list[Future[bytes]]]:
    """Returns the file's length, and futures of its pieces' hashes."""
    length = _checked(path, lambda: path.stat().st_size)
    return length, [pool.submit(_piece_sha256, path, first) for first in range(0, length, PIECE_BYTES)]


def _digest(folder: Path, pending: Sequence[tuple[int, list[Future[bytes]]]]) -> bytes:
    whole = hashlib.sha256(TAG)
    whole.update(hashlib.sha256(_canonical_config(folder)).digest())
    whole.update(len(pending).to_bytes(4, "little"))
    for length, pieces in pending:
        file = hashlib.sha256(length.to_bytes(8, "little"))
        for piece in pieces:
            file.update(piece.result())
        whole.update(file.digest())
    return whole.digest()


def _canonical_config(folder: Path) -> bytes:
    fields = read_json(folder / "config.json")
    kept = {name: value for name, value in fields.items() if name not in INCIDENTAL_FIELDS}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _piece_sha256(path: Path, first: int) -> bytes:
    def hashed() -> bytes:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            for at in range(first, first + PIECE_BYTES, READ_BYTES):
                digest.update(os.pread(file.fileno(), READ_BYTES, at))
        return digest.digest()

    return _checked(path, hashed)


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from error
