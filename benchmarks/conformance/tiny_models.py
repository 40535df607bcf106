"""Small models with random weights for engines' proofs: all attention full; every other layer with a window, or with a
recurrent state.

    python -m benchmarks.conformance.tiny_models FOLDER

The tokenizer is of bytes. Random weights of this spread make tokens depend on the whole prompt: a wrong page shows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
WINDOW_TOKENS = 64
SHARPER = 5.0


def write_models(folder: Path) -> None:
    tokenizer = _tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(0)
    full = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **SIZES, **special))
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=layers,
        **SIZES,
        **special,
    )
    windows = Gemma3ForCausalLM(config)
    # Gemma scales embeddings up and ties the last layer to them: unless they are small, each token repeats itself.
    windows.model.embed_tokens.weight.data.mul_(0.02)
    for layer in windows.model.layers:
        # Its keys and queries are normalized: sharper attention, or no single token matters.
        layer.self_attn.q_norm.weight.data.fill_(SHARPER)
    for name, model in (("full", full), ("windows", windows), ("states", _states(len(tokenizer), special))):
        model.to(torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _states(num_tokens: int, special: dict[str, Any]) -> Lfm2ForCausalLM:
    """Short convolutions, whose state is their last inputs."""
    layers = ["conv", "full_attention"] * 2
    sizes = {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}
    # Fields of published configs, which vLLM reads.
    sizes.update(conv_dim=SIZES["hidden_size"], block_dim=SIZES["hidden_size"])
    model = Lfm2ForCausalLM(Lfm2Config(vocab_size=num_tokens, layer_types=layers, **sizes, **SIZES, **special))
    for layer in model.model.layers[1::2]:
        layer.self_attn.q_layernorm.weight.data.fill_(SHARPER)
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
