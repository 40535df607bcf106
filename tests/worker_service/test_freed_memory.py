"""A worker on a CPU keeps the memory that a launch frees for the next one."""

import ctypes
import subprocess
import sys

import pytest

# 40 MB are above every threshold that glibc reaches by itself. The first few come as new pages in any case: what is
# split off to align them stays in glibc's small caches until these are full.
CODE = """
import resource
import torch
from worker_service.model.device import prepare_process

prepare_process(torch.device("cpu"), 1)
for _ in range(24):
    torch.ones(10 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.ones(10 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = (40 << 20) // 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_a_large_tensor_takes_the_memory_of_the_one_before() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(run.stdout) < PAGES
