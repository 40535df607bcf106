"""The CUDA device of the tests that need one."""

import pytest
import torch

from worker_service.model.device import prepare_process

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def prepared_cuda() -> torch.device:
    """Returns the device, for a module's top: cuBLAS reads its settings once, at its first use in the process."""
    device = torch.device("cuda", 0)
    if torch.cuda.is_available():
        prepare_process(device, 0)
    return device
