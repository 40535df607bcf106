"""What a kind of group means is said in cache_service/core/kinds alone: no other module asks for a group's kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from session.words import GroupKind
from tests.architecture.sources import ROOT, modules, parse, relative

KINDS = ROOT / "cache_service/core/kinds"
# Pairs the two ways in which pages are held: with their node, or one by one.
PAIRS = {"cache_service/core/device_cache.py"}
# Of a cache: its groups of the one way or of the other. To go over them is fine, to decide by them is not.
WAYS = {"sparse", "pools", "full_pools"}
SHARED = {"__init__", "group", "layout", "registry", "sparse_group"}


def kind_files() -> set[str]:
    return {path.stem for path in KINDS.glob("*.py")} - SHARED


def asked(node: ast.AST) -> Iterator[str]:
    """How this node names or asks for a kind."""
    if (
        isinstance(node, ast.Attribute)
        and node.attr in GroupKind.__members__
        and ast.unparse(node.value).endswith("Kind")
    ):
        yield f"names {ast.unparse(node)}"
    if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] in kind_files():
        yield f"imports {node.module}"
    if isinstance(node, ast.Compare) and {"kind"} & {getattr(part, "attr", "") for part in _of_groups(node)}:
        yield f"compares {ast.unparse(node)}"
    is_type_test = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type")
    if is_type_test and "Group" in ast.unparse(node):
        yield f"asks {ast.unparse(node)}"


def _of_groups(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes of what is called a group or a spec."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and ast.unparse(part.value).rpartition(".")[2] in ("group", "spec"):
            yield part


def decided(node: ast.AST) -> Iterator[str]:
    """Whether this node takes a branch by the way in which pages are held."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.BoolOp):
        tests = node.values if isinstance(node, ast.BoolOp) else [node.test]
        for test in tests:
            if isinstance(test, ast.UnaryOp):
                test = test.operand
            if isinstance(test, ast.Attribute) and test.attr in WAYS:
                yield f"decides by {ast.unparse(test)}"


def findings(path: Path) -> list[str]:
    nodes = list(ast.walk(parse(path)))
    found = [finding for node in nodes for finding in asked(node)]
    return found + [finding for node in nodes for finding in decided(node)]


def outside() -> list[Path]:
    return [path for path in modules("cache_service") if path.parent != KINDS and relative(path) not in PAIRS]


@pytest.mark.parametrize("path", outside(), ids=relative)
def test_no_module_but_the_kinds_asks_for_a_kind(path: Path) -> None:
    assert not findings(path)


def test_each_kind_is_one_file() -> None:
    assert kind_files() == {kind.name.lower() for kind in GroupKind}


@pytest.mark.parametrize(
    "line",
    [
        "if group.spec.kind == GroupKind.STATE: pass",
        "if words.GroupKind.FULL in kinds: pass",
        "from cache_service.core.kinds.window import WindowGroup",
        "if spec.kind is wanted: pass",
        "if isinstance(group, SparseGroup): pass",
        "if cache.sparse: pass",
        "if ready and not cache.full_pools: pass",
        "pages = 0 if cache.pools else 1",
    ],
)
def test_such_lines_are_found(line: str) -> None:
    nodes = list(ast.walk(ast.parse(line)))
    assert [*(found for node in nodes for found in (*asked(node), *decided(node)))]
