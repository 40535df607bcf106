"""The worker's settings: one frozen dataclass, filled from flags and STEMCACHE_WORKER_* variables.

What can only be checked once the model is loaded (thresholds against its length) is checked there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpc.address import parse_address
from rpc.logs import LEVELS
from rpc.settings import SettingsError, load, setting
from session.limits import MAX_PAGES

ENV_PREFIX = "STEMCACHE_WORKER_"
TIERS = ("none", "memory", "redis")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8_e4m3")
EXPERT_WEIGHTS = ("stored", "dequantised")
BACKENDS = ("auto", "reference")
INVARIANCES = ("strict", "batch", "fast")
# Of attention_segment_tokens, as the kernel takes it.
LEAST_SEGMENT, SEGMENT_STEP = 4096, 128
# A prompt of one token, and one of the answer.
LEAST_MODEL_LEN = 2


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model: str = setting("", "Folder of a Hugging Face checkpoint, or its hub id; required.")
    worker_id: str = setting("", "Name of this worker; drawn at random when empty.")
    cache: str = setting("127.0.0.1:7400", "Address of the cache service.")
    listen: str = setting("127.0.0.1:7500", "Address to serve ModelWorker on; port 0 takes a free one.")
    advertise: str = setting("", "Address at which others reach this worker; empty: the bound one.")
    admin_listen: str = setting(
        "127.0.0.1:7580", "Address to serve WorkerAdmin (Drain) on; port 0 takes a free one, empty: nowhere."
    )
    metrics_listen: str = setting("", "Address of the Prometheus endpoint; empty: none.")
    host_tier: str = setting("none", "Where spilled pages go.", choices=TIERS)
    redis_url: str = setting("", "redis://user:password@host:port/db, for host_tier redis.", secret=True)
    memory_tier_mb: int = setting(1024, "Size of host_tier memory, in MiB.", minimum=1)
    host_ttl_s: int = setting(86_400, "Life of a value in Redis.", minimum=1)
    host_timeout_s: float = setting(2.0, "Silence of Redis after which a transfer fails.", minimum=0.01)
    host_part_kb: int = setting(
        4096,
        "Pages of more KiB than this go to the host tier in parts of this size; equal on workers that share pages.",
        minimum=1,
        maximum=262_144,
    )
    device: str = setting("auto", "Where the model runs.", choices=DEVICES)
    dtype: str = setting("auto", "auto: fp32 on a CPU, the checkpoint's on a GPU.", choices=DTYPES)
    kv_dtype: str = setting(
        "auto",
        "Keys and values in pages. auto: as the model's dtype; fp8_e4m3: a byte each, with 3 bits of mantissa.",
        choices=KV_DTYPES,
    )
    index_key_dtype: str = setting(
        "auto",
        "Keys of a sparse attention's indexer in pages. auto: as the model's dtype; fp8_e4m3: a byte each, and a scale "
        "for each token.",
        choices=KV_DTYPES,
    )
    expert_weights: str = setting(
        "stored",
        "Experts of fp8 and mxfp4 checkpoints on a GPU. stored: as in the files, and dequantised by each product; "
        "dequantised: in dtype. The answers have the same bits.",
        choices=EXPERT_WEIGHTS,
    )
    kernel_backend: str = setting(
        "auto", "auto: the kernels of the device; reference: plain PyTorch, slow, to compare with.", choices=BACKENDS
    )
    page_tokens: int = setting(0, "Token slots of a page; 0: the model's own, mostly 16.", minimum=0, maximum=256)
    pool_pages: int = setting(
        0,
        "Pages of the pool that keeps whole prompts; 0: as many as pool_mb holds.",
        minimum=0,
        maximum=MAX_PAGES,
    )
    pool_mb: int = setting(
        0, "Memory of the pools, in MiB; 0: 512 on a CPU, memory_fraction on a GPU.", minimum=0, maximum=1 << 30
    )
    memory_fraction: float = setting(0.9, "Share of the free GPU memory for pools.", minimum=0.01, maximum=1.0)
    window_share: float = setting(
        0.04,
        "Pages of a sliding-window pool beside those of running sequences, as a share of the pool of whole prompts.",
        minimum=0.0,
        maximum=1.0,
    )
    state_share: float = setting(
        0.5,
        "Memory of snapshots, as a share of that of the pool of whole prompts; never more snapshots than its pages. "
        "For models with recurrent states.",
        minimum=0.0,
        maximum=1000.0,
    )
    state_interval_tokens: int = setting(
        512,
        "How far apart a prompt leaves snapshots where no resume is known, while there are slots to spare; a multiple "
        "of page_tokens; 0: none. For models with recurrent states.",
        minimum=0,
        maximum=1 << 20,
    )
    latent_chunk_tokens: int = setting(
        32_768,
        "Tokens of which a prompt over latents makes keys and values at a time; their memory is taken off the pools.",
        minimum=1024,
    )
    attention_segment_tokens: int = setting(
        0,
        "Keys after which a prompt's softmax begins anew, so that few new tokens behind a long prefix take less time "
        "(on Hopper): a multiple of 128 from 4096 on; 0: nowhere.",
        minimum=0,
        maximum=1 << 20,
    )
    max_model_len: int = setting(0, "Longest prompt and answer together; 0: the model's.", minimum=0)
    max_num_seqs: int = setting(64, "Sequences in one launch.", minimum=1, maximum=4096)
    max_waiting: int = setting(1024, "Requests that may wait; more are refused.", minimum=1)
    token_budget: int = setting(2048, "Tokens computed in one launch.", minimum=1)
    mixed_prefill_tokens: int = setting(
        192, "Most tokens of prompts beside decoding sequences, while few prompts wait; 0: no limit.", minimum=0
    )
    long_prefill_token_threshold: int = setting(0, "Most tokens of one prompt in one launch; 0: no limit.", minimum=0)
    chunked_prefill: bool = setting(True, "Whether a prompt may spread over several launches.")
    prefix_caching: bool = setting(True, "Whether requests reuse each other's prefixes.")
    decode_ahead_tokens: int = setting(
        32, "Tokens ahead for which a decoding sequence asks pages, to go on without the cache service.", minimum=0
    )
    max_decode_ahead_tokens: int = setting(
        8192, "The most such tokens while pages are free, of which half are for that; 0: no more than that.", minimum=0
    )
    async_scheduling: bool = setting(True, "Whether a launch is queued while the one before it runs.")
    reserve_pages: int = setting(0, "Pages that stay free or evictable after an admission.", minimum=0)
    invariance: str = setting(
        "batch",
        "batch: a token's bits depend on no other request; strict: nor on what was decoded before; fast: on both.",
        choices=INVARIANCES,
    )
    cuda_graphs: bool = setting(True, "Whether decode steps and small prompts are captured when the worker starts.")
    threads: int = setting(0, "CPU threads of the model; 0: all cores.", minimum=0, maximum=1024)
    mover_threads: int = setting(2, "Transfers that run at once.", minimum=1)
    max_queued_transfers: int = setting(256, "Transfers that may wait.", minimum=1)
    reply_timeout_s: float = setting(10.0, "Silence of the cache service that ends the session.", minimum=0.05)
    detach_after_ms: int = setting(
        50,
        "Silence of the cache service after which streams that lack pages take them from the worker's cached prompts; "
        "0: they wait.",
        minimum=0,
        maximum=60_000,
    )
    drain_timeout_s: float = setting(30.0, "The most time that running requests get at the end.", minimum=0.0)
    request_timeout_s: float = setting(3600.0, "The most time that one Generate call may take.", minimum=0.001)
    launch_timeout_s: float = setting(
        60.0, "Time after which a forward pass counts as hung and the worker ends; 0: no limit.", minimum=0.0
    )
    trace_path: str = setting("", "File for a trace of the last steps and launches, written at the end; empty: none.")
    log_level: str = setting("info", "Least severity that is logged.", choices=LEVELS)

    def __post_init__(self) -> None:
        if not self.model:
            raise SettingsError("model", "must name a folder or a hub id")
        if (self.host_tier == "redis") != bool(self.redis_url):
            raise SettingsError("redis_url", "goes with host_tier redis, and only with it")
        if self.redis_url and not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise SettingsError("redis_url", "must start with redis://, rediss:// or unix://")
        if 0 < self.max_model_len < LEAST_MODEL_LEN:
            raise SettingsError("max_model_len", f"must be 0 or at least {LEAST_MODEL_LEN}: a prompt and its answer")
        segment = self.attention_segment_tokens
        if segment and (segment < LEAST_SEGMENT or segment % SEGMENT_STEP):
            raise SettingsError(
                "attention_segment_tokens", f"must be 0 or a multiple of {SEGMENT_STEP} from {LEAST_SEGMENT} on"
            )
        for name in ("cache", "listen", "advertise", "admin_listen", "metrics_listen"):
            self._check_address(name, getattr(self, name))

    def _check_address(self, name: str, text: str) -> None:
        if not text and name in ("advertise", "admin_listen", "metrics_listen"):
            return
        try:
            parse_address(text)
        except ValueError as error:
            raise SettingsError(name, str(error)) from error


def load_config(arguments: Sequence[str], environment: Mapping[str, str]) -> WorkerConfig:
    return load(WorkerConfig, ENV_PREFIX, arguments, environment, prog="python -m worker_service")
