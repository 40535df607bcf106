"""Only what Triton or Gluon compiles goes without annotations, and it lies where pyproject.toml tells mypy so."""

from __future__ import annotations

import ast

from tests.architecture.sources import is_jit, modules, parse, relative

JIT_MODULES = (
    "triton.py",
    "plan_triton.py",
    "chunks_triton.py",
    "splits_triton.py",
    "kept_triton.py",
    "merge_triton.py",
    "launches.py",
)


def test_jit_functions_lie_in_the_modules_that_mypy_is_told_of() -> None:
    elsewhere = [
        f"{relative(path)}: {node.name}"
        for path in modules("kernels")
        if path.name not in JIT_MODULES and "hopper" not in path.parent.parts
        for node in ast.walk(parse(path))
        if is_jit(node)
    ]
    assert not elsewhere, elsewhere


def test_every_other_function_of_the_kernels_is_annotated() -> None:
    bare = [
        f"{relative(path)}: {node.name}"
        for path in modules("kernels")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef) and not is_jit(node) and not _annotated(node)
    ]
    assert not bare, bare


def _annotated(node: ast.FunctionDef) -> bool:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return node.returns is not None and all(arg.annotation or arg.arg in ("self", "cls") for arg in given)
