"""A model by its hub id: what a worker needs of it is downloaded, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from worker_service.core.errors import ModelError
from worker_service.model.checkpoint_files import INDEX, WEIGHTS, read_index
from worker_service.model.tokenizer import TOKENIZER, TOKENIZER_CONFIG

SMALL_FILES = ("config.json", "generation_config.json", TOKENIZER, TOKENIZER_CONFIG, "chat_template.jinja", INDEX)


def resolve_folder(model: str) -> Path:
    """Returns a folder unchanged, else a hub id's snapshot.

    The index comes first and names the shards: repositories keep other copies of their weights beside them
    (consolidated.safetensors, original/), which would double the download.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    snapshot = _fetched(model, None, SMALL_FILES)
    has_index = (snapshot / INDEX).is_file()
    files = sorted(set(read_index(snapshot).values())) if has_index else [WEIGHTS]
    # The folder of a snapshot is called by its commit: both halves are of the same one.
    return _fetched(model, snapshot.name, files)


def _fetched(model: str, revision: str | None, files: Sequence[str]) -> Path:
    # A worker that serves a folder starts without the hub's client: 0.3 s of imports.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            "model", f"{model!r} is neither a folder nor a hub id that can be fetched ({error})"
        ) from error
