"""Files and functions stay small enough to be read in one go, and say what they are."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.sources import OTHERS, PRODUCT, is_jit, modules, parse, relative

MAX_MODULE_LINES = 400
MAX_TEST_LINES = 500
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize(("folders", "limit"), [(PRODUCT, MAX_MODULE_LINES), (OTHERS, MAX_TEST_LINES)])
def test_files(folders: tuple[str, ...], limit: int) -> None:
    lengths = {relative(path): path.read_text(encoding="utf-8").count("\n") for path in modules(*folders)}
    assert lengths
    long = {name: length for name, length in lengths.items() if length > limit}
    assert not long, long


def test_functions() -> None:
    long = [
        f"{relative(path)}: {node.name} has {_length(node)} lines"
        for path in modules(*PRODUCT)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > MAX_FUNCTION_LINES
        # A Triton kernel is one function by nature, and so is each role of a Gluon one.
        if not is_jit(node)
    ]
    assert not long, long


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_every_module_says_what_it_is_for() -> None:
    silent = [relative(path) for path in modules(*PRODUCT) if parse(path).body and not ast.get_docstring(parse(path))]
    assert not silent, silent
