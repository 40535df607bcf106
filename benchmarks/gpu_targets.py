"""The figures that an op is to reach on one H200, by op and case, in the unit of its row.

A row without an entry has no target.
"""

TARGETS: dict[str, dict[str, float]] = {
    "prefill_attention": {"8 x (4096 + 512)": 570, "4 x (0 + 8192)": 570, "1 x (32768 + 2048)": 600},
    "decode_attention": {
        "B1 L4096": 970,
        "B1 L32768": 2650,
        "B16 L4096": 3500,
        "B16 L32768": 4380,
        "B64 L4096": 4230,
        "B256 L4096": 4470,
    },
    "mla_prefill": {"4 x (4096 + 512)": 520, "4 x (0 + 4096)": 540},
    "mla_decode": {
        "128 heads B64 L8192": 450,
        "16 heads B64 L8192": 3900,
        "16 heads B64 L8192, by load, in 16 layers": 4200,
        "128 heads B64 L8192, by load, in 16 layers": 580,
    },
    # 60 % of the GEMM ceiling.
    "index_logits": {"1 x (0 + 2048)": 470, "1 x (63488 + 2048)": 470, "B64 L65536": 470},
    "project_latents": {"16384 latents, 128 heads": 600},
    "pack_pages": {"16384 pages of 32768 B": 4050, "4096 pages of 131072 B": 4050},
    "unpack_pages": {"16384 pages of 32768 B": 3950, "4096 pages of 131072 B": 3950},
    "gather_pages": {"131072 tokens, NHD": 4050, "131072 tokens, HND": 4050},
    "scatter_pages": {"131072 tokens, NHD": 3950, "131072 tokens, HND": 3950},
    "append_kv": {"65536 tokens": 3860, "4096 tokens": 2581},  # the latter is 13 us
    "rotate_append_kv": {"65536 tokens": 3860},
    "gather_latent": {"64 x (4096 + 0)": 3900},
    "merge_attention_states": {"8192 x 32 x 128": 3900},
}


def target(op: str, case: str) -> float | None:
    return TARGETS.get(op, {}).get(case)
