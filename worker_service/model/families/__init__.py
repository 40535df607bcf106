"""Every family that a worker serves, by the name that `architectures` has in its config.json."""

from __future__ import annotations

from worker_service.core.errors import ModelError
from worker_service.model.families import (
    bamba,
    cohere2,
    deepseek,
    deepseek_v4,
    falcon_h1,
    gated_delta,
    gemma,
    glm4_moe,
    gpt_oss,
    granite_hybrid,
    kimi_linear,
    lfm2,
    llama,
    mimo_v2,
    mixtral,
    nemotron_h,
    qwen3_moe,
    sparse_latents,
)
from worker_service.model.families.family import Family

FAMILIES = (
    llama.FAMILY,
    llama.FAMILY_QWEN,
    llama.FAMILY_MISTRAL,
    mixtral.FAMILY,
    qwen3_moe.FAMILY,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    gemma.FAMILY2,
    gemma.FAMILY3,
    cohere2.FAMILY,
    mimo_v2.FAMILY,
    deepseek.FAMILY_V2,
    deepseek.FAMILY_V3,
    deepseek.FAMILY_GLM4_LITE,
    sparse_latents.FAMILY_V32,
    deepseek_v4.FAMILY,
    sparse_latents.FAMILY_GLM_DSA,
    lfm2.FAMILY,
    bamba.FAMILY,
    granite_hybrid.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
    gated_delta.FAMILY_NEXT,
    gated_delta.FAMILY_DENSE,
    gated_delta.FAMILY_MOE,
    kimi_linear.FAMILY,
)
BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.architectures}


def family_of(architecture: str) -> Family:
    family = BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise ModelError("architectures", f"{architecture!r} is not supported; {', '.join(BY_ARCHITECTURE)} are")
    return family
