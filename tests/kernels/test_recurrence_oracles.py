"""The recurrences as transformers computes them on a CPU: its functions for the gated delta rule and for Kimi Delta
Attention, its Mamba2 mixer."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from kernels.block_scan import plan_scan
from kernels.gated_delta_scan import gated_delta_scan
from kernels.mamba2_scan import Mamba2Steps, mamba2_scan
from tests.kernels.conftest import INTERPRETING
from tests.kernels.state_inputs import StateRow, begins, make_slots

pytestmark = pytest.mark.skipif(INTERPRETING, reason="what a CPU takes")

BACKENDS = [Backend.AUTO, Backend.REFERENCE]


def made(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("family", "oracle"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_gated_delta_rule(family: str, oracle: str, backend: Backend, tokens: int) -> None:
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    heads, size = 4, 128 if family == "qwen3_next" else 48
    q, k, v = made(tokens, heads, size, seed=0), made(tokens, heads, size, seed=1), made(tokens, heads, 64, seed=2)
    decays = (tokens, heads) if family == "qwen3_next" else (tokens, heads, size)
    g, beta = -made(*decays, seed=3).abs(), made(tokens, heads, seed=4).sigmoid()
    slots, count = make_slots([StateRow(tokens)])
    states, cu = torch.zeros(count, heads, size, 64), begins([StateRow(tokens)])
    plan = plan_scan(cu, cu, slots, tokens)
    got = gated_delta_scan(q, k, v, g, beta, states, plan, norm_eps=1e-6, backend=backend)
    wanted, state = getattr(modeling, oracle)(
        *(given[None] for given in (q, k, v, g, beta)), initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    for mine, theirs in ((got, wanted[0]), (states[slots.working[0]], state[0])):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=5e-5 * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [2, 64, 300])
def test_mamba2(backend: Backend, tokens: int) -> None:
    """The whole mixer with its projections and norm, our recurrence in the place of its own."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    config = transformers.BambaConfig(
        hidden_size=64, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=32, mamba_expand=2,
        mamba_d_conv=4, mamba_chunk_size=64, num_hidden_layers=1, vocab_size=32, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    mixer = modeling.BambaMixer(config, layer_idx=0).eval()
    hidden = made(1, tokens, 64, seed=1)
    with torch.no_grad():
        mixer.dt_bias.copy_(made(8, seed=2))
        wanted = mixer(hidden)[0]
        gate, columns, raw = mixer.in_proj(hidden[0]).split([128, mixer.conv_dim, 8], dim=-1)
        columns = torch.nn.functional.silu(mixer.conv1d(columns.T[None])[0, :, :tokens].T.contiguous())
        x, b, c = columns.split([128, 64, 64], dim=-1)
        slots, count = make_slots([StateRow(tokens)])
        cu = begins([StateRow(tokens)])
        steps = Mamba2Steps(raw, mixer.dt_bias.detach(), -mixer.A_log.detach().exp(), *mixer.time_step_limit)
        y = mamba2_scan(
            x.unflatten(1, (8, 16)), b.unflatten(1, (2, 32)), c.unflatten(1, (2, 32)), steps,
            torch.zeros(count, 8, 16, 32), plan_scan(cu, cu, slots, tokens), skip=mixer.D.detach(), backend=backend,
        )  # fmt: skip
        got = mixer.out_proj(mixer.norm(y.flatten(1), gate))
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=1e-5 * max(1.0, wanted.abs().max().item()))
