"""What the tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from register_qa.training.tokenizer import train_tokenizer


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """As training makes it: seconds of work. Nobody changes it."""
    return train_tokenizer()
