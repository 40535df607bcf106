"""GPU operations of LLM serving, on paged keys and values and on slots of recurrent states; one folder for each op.

Tensors come in, tensors go out. Each folder holds the op itself (`__init__`: it checks its arguments and chooses), the
Triton kernel with its launcher (`triton`), the torch reference that is the truth for the tests and what a worker
without a GPU serves with (`reference`), and where it pays a plan of a step's work (`plan`, `plan_triton`; of
decode_attention `splits_triton`) and a Gluon kernel for Hopper (`hopper`).

    from kernels.append_kv import append_kv, rotate_append_kv
    from kernels.block_scan import plan_scan
    from kernels.causal_conv import causal_conv
    from kernels.combine_experts import combine_experts
    from kernels.copy_pages import pack_pages, unpack_pages
    from kernels.copy_states import copy_states
    from kernels.decode_attention import decode_attention
    from kernels.gated_activation import clamped_swiglu, gelu_mul, silu_mul
    from kernels.gated_delta_scan import gated_delta_scan
    from kernels.gather_latent import gather_latent
    from kernels.gather_pages import gather_pages, scatter_pages
    from kernels.grouped_linear import grouped_linear, plan_experts
    from kernels.head_linear import head_linear
    from kernels.layout import KvLayout, expand_block_tables
    from kernels.linear import linear
    from kernels.mamba2_scan import mamba2_scan
    from kernels.merge_attention_states import merge_attention_states
    from kernels.mla import mla_absorbed, mla_extend, plan_extend
    from kernels.mla_decode import mla_decode
    from kernels.mla_prefill import mla_prefill
    from kernels.prefill_attention import prefill_attention
    from kernels.project_latents import project_latents
    from kernels.rms_norm import rms_norm
    from kernels.rotate_append_latent import rotate_append_latent
    from kernels.route_experts import route_experts
    from kernels.sample_tokens import sample_tokens
    from kernels.softcap_logits import softcap_logits
    from kernels.state_slots import StateSlots
    from kernels.state_update import update_gated_delta, update_mamba2
    from kernels.top_logprobs import top_logprobs
"""
