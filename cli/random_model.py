"""A small seeded Llama in a Hugging Face folder: random weights, byte-level tokenizer, long positions.

Its text means nothing, but it varies and is readable: one hidden dimension is a constant that the layers never write,
and through it the head prefers lower-case letters, spaces and punctuation.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.config import parse_model_spec
from worker_service.model.decoder import expected_shapes

BYTES = 256
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
END_TOKEN_ID = BYTES + SPECIAL_TOKENS.index("<|end|>")
READABLE = string.ascii_lowercase + " .,"

HEAD_DIM = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": BYTES + len(SPECIAL_TOKENS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_TOKEN_ID,
}
CONSTANT_DIM = 0
CONSTANT = 1.0
READABLE_BIAS = 30.0
HEAD_GAIN = 3.0
# Pointed attention over weak embeddings: the text depends on the whole prompt, not on the last character alone. Much
# more would magnify rounding, until cached and cold answers could differ.
EMBEDDING_GAIN = 0.5
QUERY_KEY_GAIN = 2.0


def make_random_model(folder: Path, seed: int = 0) -> None:
    """Writes config.json, tokenizer.json and model.safetensors; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    _tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_weights(seed), folder / WEIGHTS, metadata={"format": "pt"})


def _tokenizer() -> Tokenizer:
    """One token for each byte, no merges: ids 0..255 are the byte-level alphabet in order, special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: token_id for token_id, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(parse_model_spec(CONFIG)).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
    _shape_text(weights)
    return weights


def _shape_text(weights: dict[str, torch.Tensor]) -> None:
    """Lets the constant dimension speak for readable characters, and everything else choose among them."""
    tokenizer = _tokenizer()
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings *= math.sqrt(embeddings.shape[1]) * EMBEDDING_GAIN
    embeddings[:, CONSTANT_DIM] = CONSTANT
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight *= QUERY_KEY_GAIN
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[CONSTANT_DIM] = 0.0
        elif "_proj" in name:
            weight[:, CONSTANT_DIM] = 0.0
    head *= HEAD_GAIN
    head[:, CONSTANT_DIM] = -READABLE_BIAS
    readable = tokenizer.encode(READABLE).ids
    head[readable, CONSTANT_DIM] = READABLE_BIAS
