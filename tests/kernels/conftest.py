"""Where the kernel tests run: the references on the CPU, Triton on a GPU, or Triton in its interpreter.

TRITON_INTERPRET is read when Triton is imported, so one process is either a real one (references, and Triton on a GPU
if there is one) or an interpreting one; test_interpreted.py starts the latter.
"""

import os
from typing import Any

import pytest

from tests.examples import thorough
from tests.kernels.target import CUDA, HOPPER, INTERPRETER, REFERENCE, Target

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:
    from tests.kernels.interpreter import mend

    mend()

_GPU = pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)
_HOPPER = pytest.param(HOPPER, id="hopper", marks=pytest.mark.gpu)
_INTERPRETER = pytest.param(INTERPRETER, id="interpreter")
_REFERENCE = pytest.param(REFERENCE, id="reference")


def rarely_interpreted(*values: object) -> Any:
    """Returns the values of one case, which the interpreter is given in the thorough run only, all others always."""
    return thorough(*values) if INTERPRETING else pytest.param(*values)


def _available(target: Target) -> Target:
    if target.device == CUDA.device:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    return target


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every implementation of an op that this process can run. The attention ops have Gluon tests of their own."""
    if "target" in metafunc.fixturenames:
        targets = [_INTERPRETER] if INTERPRETING else [_REFERENCE, _GPU]
        if not INTERPRETING and ".test_mla" in metafunc.module.__name__:
            targets.append(_HOPPER)
        metafunc.parametrize("target", targets, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    return _available(request.param)
