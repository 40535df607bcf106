"""The hybrid in training: the scan is the rule, the folder is a Qwen3.5 to transformers and to the worker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from register_qa.training.architectures import ARCHITECTURES
from register_qa.training.delta_scan import gated_delta, unit_lower_inverse
from register_qa.training.evaluate import Trial, evaluate
from register_qa.training.folder import read_weights, write_folder
from register_qa.training.hybrid import HybridArchitecture
from register_qa.training.tokenizer import Encoder
from register_qa.training.train import Plan, Progress, Trainer
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import expected_shapes
from worker_service.model.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SMALL = HybridArchitecture(
    vocab_size=2048,
    hidden_size=32,
    intermediate_size=64,
    attending=(False, True, False),
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rotary_dim=8,
    delta_heads=4,
    delta_k_heads=2,
    delta_dim=16,
    max_positions=1024,
    rope_theta=10000.0,
)
# Pointing needs attention above the first half: of four layers the third.
TRAINED = replace(SMALL, attending=(False, False, True, False))


def token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    state, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        error = (v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0]) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * error[:, :, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(out, dim=2)


def assert_near(of_scan: torch.Tensor, of_rule: torch.Tensor) -> None:
    assert (of_scan - of_rule).abs().max() <= 1e-4 * of_rule.abs().max()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 330])
@pytest.mark.parametrize("fastest", [0.01, 20.0])
def test_the_scan_and_its_gradients_are_the_rule_s(length: int, fastest: float) -> None:
    """With decays that hardly fade, and with those of which exp(-sum) would overflow."""
    torch.manual_seed(length)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, length, 16), dim=-1) for _ in range(2))
    v = torch.randn(2, 3, length, 24)
    g, beta = -fastest * torch.rand(2, 3, length), torch.rand(2, 3, length)
    gradients = []
    results = []
    for rule in (gated_delta, token_by_token):
        inputs = [rows.clone().requires_grad_() for rows in (q, k, v, g, beta)]
        out = rule(*inputs)
        out.square().sum().backward()
        results.append(out.detach())
        gradients.append([rows.grad for rows in inputs])
    # Sums of a block reach -640, of which fp32 keeps 3e-5: differences of them are decays.
    assert_near(*results)
    for of_scan, of_rule in zip(*gradients, strict=True):
        assert of_scan is not None
        assert of_rule is not None
        assert_near(of_scan, of_rule)


def test_the_inverse_of_alike_keys() -> None:
    """All keys the same and every beta 1: powers of the matrix would be as large as 1e18."""
    a = torch.ones(64, 64).tril(-1)
    torch.testing.assert_close((torch.eye(64) + a) @ unit_lower_inverse(a), torch.eye(64))


def test_a_row_does_not_depend_on_later_tokens() -> None:
    torch.manual_seed(1)
    model = SMALL.build().eval()
    tokens = torch.randint(2048, (1, 150))
    other = tokens.clone()
    other[:, 100:] = torch.randint(2048, (1, 50))
    assert torch.equal(model(tokens)[:, :100], model(other)[:, :100])


def test_transformers_reads_the_folder_and_gives_the_same_logits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(2)
    model = SMALL.build()
    write_folder(tmp_path, SMALL, model, tokenizer)
    read_weights(tmp_path, model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(2048, (2, 200))
    with torch.no_grad():
        expected, logits = theirs(tokens).logits, model(tokens)
    assert (logits - expected).abs().max() <= 5e-5 * expected.abs().max()


def test_a_few_steps_run_and_the_worker_loads_what_they_leave(tmp_path: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = TRAINED.build()
    seen: list[Progress] = []
    plan = Plan("short", 20, 0.1, report_every=10, compiled=False)
    Trainer(model, tokenizer, plan, CPU).run(seen.append)
    assert [progress.step for progress in seen] == [10, 20]
    assert seen[-1].answer_loss < 0.9 * seen[0].answer_loss
    assert seen[0].guidance_loss > 0
    write_folder(tmp_path, TRAINED, model, tokenizer)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert shapes == expected_shapes(read_model_spec(tmp_path))
    assert load_model(str(tmp_path), CPU).spec.max_model_len == 1024
    score = evaluate(model, Encoder(tokenizer), Trial(1, 5, 1), CPU)
    assert sum(score.asked.values()) == 6


def test_the_hybrid_in_the_table_is_small_and_points_from_attention() -> None:
    architecture = ARCHITECTURES["hybrid-4m"]
    model = architecture.build()
    assert sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000
    inside = model.inside(torch.randint(2048, (1, 70)), torch.tensor([[69]]))
    assert inside.pointing.shape == (1, 1, 70)
    kinds = architecture.config(0, 1)["layer_types"]
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (4, 2)
    assert json.dumps(architecture.config(0, 1))
