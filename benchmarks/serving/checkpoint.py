"""Writes a checkpoint of random weights in the shape of Llama 3.1 8B, in shards with an index, as large models come.

    python -m benchmarks.serving.checkpoint FOLDER [--device cuda]

16 GB; a process of its own, so that what serves the checkpoint finds the device's memory free.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cli.random_model import make_random_model
from worker_service.model.checkpoint_files import INDEX, WEIGHTS
from worker_service.model.config import parse_model_spec
from worker_service.model.decoder import expected_shapes

LLAMA_8B: dict[str, Any] = {
    "_name_or_path": "random weights in the shape of Llama 3.1 8B",
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
NUM_SHARDS = 8
# Sharp attention: with flat attention a wrong page would hardly show in the answer.
QUERY_KEY_GAIN = 2.0
SEED = 1


def write_checkpoint(folder: Path, device: torch.device, config: Mapping[str, Any] = LLAMA_8B) -> None:
    """N(0, 1 / columns) in bf16; the tokenizer is that of the small random model. Shards are written side by side."""
    make_random_model(folder, SEED)  # for its tokenizer
    (folder / WEIGHTS).unlink()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(expected_shapes(parse_model_spec(dict(config))).items())
    parts = [names[number::NUM_SHARDS] for number in range(NUM_SHARDS)]

    def write(number: int) -> None:
        generator = torch.Generator(device).manual_seed(SEED * NUM_SHARDS + number)
        shard = {name: _weight(name, shape, generator) for name, shape in parts[number]}
        save_file(shard, folder / _shard_name(number), metadata={"format": "pt"})

    with ThreadPoolExecutor(NUM_SHARDS) as threads:
        list(threads.map(write, range(NUM_SHARDS)))
    weight_map = {name: _shard_name(number) for number, part in enumerate(parts) for name, _ in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    gain = QUERY_KEY_GAIN if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return weight.normal_(std=gain / shape[1] ** 0.5, generator=generator).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, torch.device(arguments.device))


if __name__ == "__main__":
    main()
