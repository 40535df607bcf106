"""transformers' generate with a prefix cache that outlives its process: a DynamicCache, filled and saved by HostTier.

    python examples/transformers_generate.py MODEL_FOLDER "a prompt" --cache 127.0.0.1:7400 --redis redis://...

Needs `pip install ./adapters torch transformers`. For models whose layers all have full attention.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from session.words import GroupKind
from tier_client.client import TierClient
from tier_client.values import PageGroup, PagePath, PageRange, TierClientConfig, fingerprint_of

PAGE_TOKENS = 16


class Answer(NamedTuple):
    """`loaded_tokens` of the prompt came from the host tier; `saved_pages` are there now for others."""

    tokens: list[int]
    loaded_tokens: int
    saved_pages: int


def page_shape(model: Any) -> tuple[int, int, int, int, int]:
    """Layers, keys and values, heads, tokens, elements: one page holds all layers."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, heads, PAGE_TOKENS, size


def weights_digest(model: Any) -> str:
    """Of every tensor's name, dtype, shape and bytes. For large models hash the files instead, once."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def attach(model: Any, cache: str, redis: str, **settings: Any) -> TierClient:
    """A client for this model: all that decides what a page's bytes mean is in the fingerprint."""
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers):
        raise ValueError("model: a layer has no full attention")
    page_bytes = torch.Size(page_shape(model)).numel() * model.dtype.itemsize
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    facts = {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}, {model.device.type}",
        "config": json.dumps(config, sort_keys=True, default=str),
        "attention": model.config._attn_implementation,
        "weights": weights_digest(model),
        "page": (page_shape(model), str(model.dtype)),
    }
    groups, whole = (PageGroup("kv", GroupKind.FULL, page_bytes),), fingerprint_of(facts)
    return TierClient(TierClientConfig(cache, redis, "hf", facts["weights"], whole, PAGE_TOKENS, groups, **settings))


def fill(client: TierClient, model: Any, prompt: list[int], salt: str) -> tuple[DynamicCache, int]:
    """A cache with as much of the prompt as the host tier has. Returns it and its number of tokens."""
    cache, loaded = DynamicCache(config=model.config), client.fetch(PagePath(tokens=prompt, salt=salt))
    if not loaded.usable_pages:
        return cache, 0
    values = [torch.frombuffer(value, dtype=model.dtype) for value in loaded.values[0].values()]  # in their order
    pages = torch.stack(values).view(len(values), *page_shape(model))
    # pages, layers, 2, heads, tokens, elements -> layers, 2, batch of 1, heads, all tokens, elements
    kv = pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).unsqueeze(2).to(model.device)
    for layer, (keys, these) in enumerate(kv):
        cache.update(keys.contiguous(), these.contiguous(), layer)
    return cache, loaded.usable_pages * PAGE_TOKENS


def save(client: TierClient, cache: DynamicCache, tokens: list[int], salt: str) -> int:
    """Every whole page that the tier lacks. Returns how many others can find now."""
    num_pages = cache.get_seq_length() // PAGE_TOKENS

    def payload(_: int, page: int) -> memoryview:
        cut = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        parts = [torch.stack((layer.keys[0, :, cut], layer.values[0, :, cut])) for layer in cache.layers]
        return memoryview(torch.stack(parts).cpu().contiguous().view(-1).view(torch.uint8).numpy())

    path = PagePath(tokens=tokens[: num_pages * PAGE_TOKENS], salt=salt)
    return client.save(path, [PageRange(0, 0, num_pages)], payload)


def generate(client: TierClient, model: Any, prompt: list[int], salt: str = "", **options: Any) -> Answer:
    """Greedy tokens after the prompt. Without the cache service, or Redis, all of it is computed."""
    cache, loaded_tokens = fill(client, model, prompt, salt)
    ids = torch.tensor([prompt], device=model.device)
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "past_key_values": cache, **options}
    tokens = model.generate(ids, **options)[0].tolist()
    return Answer(tokens[len(prompt) :], loaded_tokens, save(client, cache, tokens, salt))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--cache", default="127.0.0.1:7400")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/0")
    given = parser.parse_args()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    with attach(model.eval(), given.cache, given.redis) as client:
        answer = generate(client, model, tokenizer(given.prompt).input_ids, max_new_tokens=32)
    print(json.dumps({**answer._asdict(), "text": tokenizer.decode(answer.tokens)}))


if __name__ == "__main__":
    main()
