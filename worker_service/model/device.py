"""Device and dtype of a model, and the process-wide settings that go with them."""

from __future__ import annotations

import ctypes
import os
import platform
from importlib.metadata import version

import torch

from kernels.backend import Backend
from kernels.grouped_linear import Fp8Experts, Mxfp4Experts
from worker_service.core.errors import ModelError
from worker_service.model.weight_formats import ExpertFormat

# What pages may hold instead of the model's own dtype.
KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn}
STORED = "stored"
EXPERT_WEIGHTS = (STORED, "dequantised")
# The least compute capability whose compiler converts to e4m3, and from it.
E4M3_CAPABILITY = (8, 9)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Raised when a change to the kernels or the model's code changes bits that pages hold, once for each release. There is
# no release yet, so none has had a number.
NUMERICS_VERSION = 5
# cuBLAS without room for split-K: a row's result then depends neither on the number of rows nor on its neighbours.
CUBLAS_SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
# Numbers of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30


def pick_device(name: str) -> torch.device:
    """Returns the device; `auto` is CUDA if there is one. Raises ModelError when CUDA is asked for and missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device", f"{name!r} was asked for, but no CUDA device is there")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def pick_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Returns the dtype. `auto`: fp32 on a CPU; on CUDA the checkpoint's 16-bit type, bf16 for fp32: kernels have
    none."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "float16" if checkpoint == "float16" else "bfloat16"
    if name not in DTYPES:
        raise ModelError("dtype", f"{name!r} is not supported; {', '.join(DTYPES)} are")
    if device.type == "cuda" and name == "float32":
        raise ModelError("dtype", "float32 is served on a CPU only; bfloat16 and float16 are served on CUDA")
    return DTYPES[name]


def pick_page_dtype(field: str, name: str, device: torch.device) -> torch.dtype | None:
    """Returns what that setting's part of pages is made of; None, for `auto`, is the model's dtype."""
    if name == "auto":
        return None
    if name not in KV_DTYPES:
        raise ModelError(field, f"{name!r} is not supported; auto, {', '.join(KV_DTYPES)} are")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < E4M3_CAPABILITY:
        least, have = (".".join(map(str, version)) for version in (E4M3_CAPABILITY, found))
        raise ModelError(field, f"{name} needs a device of compute capability {least} or higher, this one has {have}")
    return KV_DTYPES[name]


def pick_expert_formats(name: str, device: torch.device) -> tuple[ExpertFormat, ...]:
    """Returns in which stored formats experts stay. `dequantised`, and on a CPU: in none."""
    if name not in EXPERT_WEIGHTS:
        raise ModelError("expert_weights", f"{name!r} is not supported; {' and '.join(EXPERT_WEIGHTS)} are")
    if name != STORED or device.type != "cuda":
        return ()
    reads_e4m3 = torch.cuda.get_device_capability(device) >= E4M3_CAPABILITY
    return (Fp8Experts, Mxfp4Experts) if reads_e4m3 else (Mxfp4Experts,)


def numerics(device: torch.device, backend: Backend) -> str:
    """Names what decides rounding on this worker: its device and the software that computes on it.

    Two workers whose numerics differ may have other bits in the same page, so the fingerprint holds them apart.
    """
    software = [f"kernels{NUMERICS_VERSION}", backend.value, f"torch{_major_minor(torch.__version__)}"]
    if device.type != "cuda":
        return "/".join([*software, "cpu", platform.machine(), torch.backends.cpu.get_cpu_capability()])
    if backend is not Backend.REFERENCE:
        software.append(f"triton{_major_minor(version('triton'))}")
    card = torch.cuda.get_device_properties(device)
    # The library picks its GEMM by the number of multiprocessors, too.
    kind = f"sm{card.major}{card.minor}x{card.multi_processor_count}"
    return "/".join([*software, f"cuda{torch.version.cuda}", kind])


def _major_minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def prepare_process(device: torch.device, num_threads: int, *, stable_gemms: bool = True) -> None:
    """Makes settings of the process, before the first tensor: threads on a CPU (0: all cores), stable GEMMs on CUDA."""
    if device.type == "cpu":
        torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))
        # Attention weights far from the best are denormal numbers, which a CPU computes with twenty times slower.
        torch.set_flush_denormal(True)
        _keep_freed_memory()
        return
    if not stable_gemms:
        return
    os.environ.update(CUBLAS_SETTINGS)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def _keep_freed_memory() -> None:
    """Has glibc keep what a launch frees for the next one, up to KEPT_BYTES.

    By default it goes back to the kernel and comes again as new pages: 170,000 of them, a tenth of the time, in 32
    prompts of 330 tokens with 64 tokens each. Other C libraries keep to their own rules.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(parameter, KEPT_BYTES)
