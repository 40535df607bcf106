"""transformers' generate over HostTier: a second process goes on from what the first one saved, with equal tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from session.words import TransferStatus
from tests.architecture.sources import ROOT
from tests.tier_client.stage import Stage
from tier_client.values import PagePath

EXAMPLE = ROOT / "examples/transformers_generate.py"
WORDS = [f"w{number}" for number in range(96)]
TEXT = " ".join(WORDS[(7 * at) % 96] for at in range(70))
PAGES = 4  # of 70 tokens: the last one is always computed, and only whole pages of 16 are reused
NEW = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with drawn weights, and a tokenizer of as many words."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("transformers_generate", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    return [WORDS.index(word) for word in TEXT.split()]


@pytest.fixture(scope="module")
def cold(model: Any, prompt: list[int]) -> list[int]:
    """What generate says without any cache of ours."""
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, do_sample=False, attention_mask=torch.ones_like(ids), **NEW)[0].tolist()
    assert len(set(tokens[len(prompt) :])) > 5, "an answer that says one word proves little"
    return tokens[len(prompt) :]


def attach(example: ModuleType, model: Any, stage: Stage) -> Any:
    settings = {"call_timeout_s": 20.0, "store_timeout_s": 20.0, "pause_s": 0.01}
    client = example.attach(model, str(stage.cache.settings["listen"]), stage.redis.url, **settings)
    stage.stack.callback(client.close)
    return client


def keys(client: Any, prompt: list[int]) -> list[bytes]:
    """Of the prompt's pages."""
    hit = client.calls.lookup(PagePath(tokens=prompt), 0)
    assert hit is not None and hit.usable_pages == PAGES
    client.calls.release(hit, 0, TransferStatus.DONE)
    return hit.pages[0].keys(0)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 120


def test_a_second_process_hits_what_the_first_one_saved(
    example: ModuleType, model: Any, folder: Path, prompt: list[int], cold: list[int], stage: Stage
) -> None:
    command = [sys.executable, str(EXAMPLE), str(folder), TEXT]
    command += ["--cache", str(stage.cache.settings["listen"]), "--redis", stage.redis.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout.splitlines()[-1])
    assert (first["loaded_tokens"], first["tokens"]) == (0, cold)
    assert first["saved_pages"] == (len(prompt) + len(cold) - 1) // 16
    assert stage.stats().attachments.usable_pages == 0

    client = attach(example, model, stage)
    again = example.generate(client, model, prompt, **NEW)
    assert (again.tokens, again.loaded_tokens, again.saved_pages) == (cold, 16 * PAGES, 0)
    stats = stage.stats()
    assert (stats.attachments.usable_pages, stats.host_tier.num_fetched_pages) == (PAGES, PAGES)

    other = example.generate(client, model, prompt, salt="another tenant", **NEW)
    assert (other.tokens, other.loaded_tokens) == (cold, 0)
    longer = [*prompt, *cold[:-1], 5]
    assert example.generate(client, model, longer, **NEW).loaded_tokens == 16 * (len(longer[:-1]) // 16)

    # What is missing or torn is computed again, and saved again.
    with stage.redis.client() as redis:
        redis.delete(keys(client, prompt)[0])
        missing = example.generate(client, model, prompt, **NEW)
        assert (missing.tokens, missing.loaded_tokens, missing.saved_pages) == (cold, 0, 1)
        torn = keys(client, prompt)[0]
        value = bytearray(redis.get(torn))
        value[100] ^= 1
        redis.set(torn, bytes(value))
        spoiled = example.generate(client, model, prompt, **NEW)
        assert (spoiled.tokens, spoiled.loaded_tokens, spoiled.saved_pages) == (cold, 0, 1)
    assert example.generate(client, model, prompt, **NEW).loaded_tokens == 16 * PAGES
    host_tier = stage.stats().host_tier
    assert (host_tier.num_missing_pages, host_tier.num_corrupt_pages) == (1, 1)

    stage.redis.kill()
    assert example.generate(client, model, prompt, **NEW) == example.Answer(cold, 0, 0)
    stage.cache.kill()
    assert example.generate(client, model, prompt, **NEW) == example.Answer(cold, 0, 0)


def test_other_weights_share_nothing(example: ModuleType, model: Any, prompt: list[int], stage: Stage) -> None:
    example.generate(attach(example, model, stage), model, prompt, **NEW)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    try:
        assert example.generate(attach(example, model, stage), model, prompt, **NEW).loaded_tokens == 0
    finally:
        with torch.no_grad():
            model.lm_head.weight[0, 0] -= 1.0
