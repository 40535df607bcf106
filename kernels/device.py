"""Cached properties of CUDA devices."""

import functools

import torch


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
