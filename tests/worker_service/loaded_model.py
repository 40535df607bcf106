"""`python -m tests.worker_service.loaded_model NAME` loads a model and says which one it was."""

from __future__ import annotations

import sys

import torch

from worker_service.model.load import load_model

if __name__ == "__main__":
    loaded = load_model(sys.argv[1], torch.device("cpu"))
    print(loaded.digest.hex(), len(loaded.spec.layers))
