"""A model folder's weights: found (or fetched from the hub), checked against the config, loaded and digested.

Knows no layer arithmetic: names, shapes and bytes only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from worker_service.model.config import ModelConfig, ModelError, read_json

Shapes = Mapping[str, tuple[int, ...]]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
# Fields of config.json that say where or by what it was written, not what the model is.
INCIDENTAL_FIELDS = ("_name_or_path", "transformers_version")
READ_BYTES = 8 << 20


def resolve_folder(model: str, revision: str | None = None) -> Path:
    """A folder as it is, else a hub id's snapshot: config, tokenizer and safetensors only."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    patterns = ["config.json", "generation_config.json", TOKENIZER, "*.safetensors", INDEX]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            "model", f"{model!r} is neither a folder nor a hub id that can be fetched ({error})"
        ) from error


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


class Checkpoint:
    """The tensors of a folder, by name, over one safetensors file or the shards that an index names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = _files_by_tensor(folder)

    def check(self, shapes: Shapes, tied_embeddings: bool) -> None:
        """Every tensor there, each of the wanted shape, and none that nobody would use."""
        for name in shapes:
            if name not in self._file_of:
                raise ModelError(name, "is missing from the weights")
        for name in self._file_of:
            if name not in shapes and not _is_derived(name, tied_embeddings):
                raise ModelError(name, "is in the weights, but the config has no place for it")
        for name, tensor_shape in self._tensor_shapes(shapes):
            if tensor_shape != shapes[name]:
                raise ModelError(name, f"has shape {list(tensor_shape)}, but the config wants {list(shapes[name])}")

    def load(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for file, names in self._by_file(shapes):
            with _opened(self._folder / file) as weights:
                for name in names:
                    tensors[name] = weights.get_tensor(name).to(device=device, dtype=dtype)
        return tensors

    def _tensor_shapes(self, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file, names in self._by_file(shapes):
            with _opened(self._folder / file) as weights:
                stored = set(weights.keys())
                for name in names:
                    if name not in stored:
                        raise ModelError(name, f"is not in {file}, though the index says so")
                    yield name, tuple(weights.get_slice(name).get_shape())

    def _by_file(self, shapes: Shapes) -> Iterator[tuple[str, list[str]]]:
        for file in sorted(set(self._file_of.values())):
            yield file, [name for name in shapes if self._file_of[name] == file]


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    shapes = expected_shapes(config)
    checkpoint.check(shapes, config.tied_embeddings)
    return checkpoint.load(shapes, dtype, device)


def model_digest(folder: Path) -> bytes:
    """What the model is, as 32 bytes: over config, tokenizer and weights, never over a path or a name.

    Each file is hashed by itself, several at once, and the hashes are framed by the file's role.
    """
    files = sorted(set(_files_by_tensor(folder).values()))
    with ThreadPoolExecutor(max_workers=4) as pool:
        hashes = list(pool.map(_file_sha256, [folder / TOKENIZER, *(folder / name for name in files)]))
    whole = hashlib.sha256(b"stemcache model 1")
    whole.update(hashlib.sha256(_canonical_config(folder)).digest())
    whole.update(len(hashes).to_bytes(4, "little"))
    for digest in hashes:
        whole.update(digest)
    return whole.digest()


def _canonical_config(folder: Path) -> bytes:
    fields = read_json(folder / "config.json")
    kept = {name: value for name, value in fields.items() if name not in INCIDENTAL_FIELDS}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _file_sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from error
    return digest.digest()


def _files_by_tensor(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(WEIGHTS, f"neither it nor {INDEX} is in the model folder")
    with _opened(folder / WEIGHTS) as weights:
        return dict.fromkeys(weights.keys(), WEIGHTS)


def _indexed_files(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelError(INDEX, "weight_map must be an object that names each tensor's file")
    for name, file in index.items():
        # A file beside the index, never a path that leads out of the folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(INDEX, f"weight_map[{name!r}] must be a file name, not {file!r}")
        if not (folder / file).is_file():
            raise ModelError(file, "is named by the index, but is not in the model folder")
    return index


def _is_derived(name: str, tied_embeddings: bool) -> bool:
    """Older checkpoints store the rotary frequencies, some tied ones the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (tied_embeddings and name == "lm_head.weight")


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(path.name, f"is not a safetensors file ({error})") from error
