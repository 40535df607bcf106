"""Names that a module imports from the repository's other modules exist, and those that a test replaces in them.

mypy reads neither tests nor benchmarks, so it sees no import there that a rename broke. Imports within functions count
too, which collecting the tests would not run: kernels are imported there. Tests that need a GPU run in no check, so
what they replace is looked up here. Nothing is run: it takes seconds.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import OTHERS, PRODUCT, ROOT, modules, parse, relative

OWN = {*PRODUCT, *OTHERS, "protos", "examples"}


def file_of(module: str) -> Path | None:
    """The file of one of the repository's modules; a package's folder where it has no __init__."""
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py", path):
        if candidate.exists():
            return candidate
    return None


def bound(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that these statements give to their module, whichever of their branches runs."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and _is_store(part))
            blocks = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt | ast.excepthandler)]
            yield from bound(part for block in blocks for part in _statements(block))


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _statements(block: ast.stmt | ast.excepthandler) -> list[ast.stmt]:
    return block.body if isinstance(block, ast.excepthandler) else [block]


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    return frozenset(bound(parse(path).body))


def is_there(module: str, name: str) -> bool:
    if file_of(f"{module}.{name}"):
        return True
    path = file_of(module)
    if path is None or path.is_dir():
        return False
    # Generated modules make their names as they are imported.
    return path.stem.endswith(("_pb2", "_pb2_grpc")) or not names_of(path).isdisjoint({name, "__getattr__"})


def missing(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in OWN and not file_of(alias.name):
                    yield f"line {node.lineno}: {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OWN:
            assert node.level == 0 and node.module
            for alias in node.names:
                if not is_there(node.module, alias.name):
                    yield f"line {node.lineno}: {node.module}.{alias.name}"


def modules_by_name(tree: ast.Module) -> dict[str, str]:
    """Returns the repository's modules that a file has imported, by the names that it has for them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OWN:
            whole = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name: module for name, module in whole.items() if file_of(module)}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname and file_of(alias.name)}
    return found


def replaced(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Returns the line, module and name of each call of setattr that names one of the repository's modules."""
    by_name = modules_by_name(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            match node.args:
                case [ast.Constant(value=str(path)), *_] if path.partition(".")[0] in OWN:
                    yield node.lineno, *path.rsplit(".", 1)
                case [ast.Name(id=name), ast.Constant(value=str(attribute)), *_] if name in by_name:
                    yield node.lineno, by_name[name], attribute


def lost_in(path: Path) -> Iterator[str]:
    for line, module, name in replaced(parse(path)):
        if not is_there(module, name):
            yield f"line {line}: {module}.{name}"


def test_imported_names_are_there() -> None:
    found = [f"{relative(path)}, {name}" for path in modules(*PRODUCT, *OTHERS, "examples") for name in missing(path)]
    assert not found, found


def test_replaced_names_are_there() -> None:
    paths = list(modules("tests"))
    assert sum(1 for path in paths for _ in replaced(parse(path))) > 50
    found = [f"{relative(path)}, {name}" for path in paths for name in lost_in(path)]
    assert not found, found


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("from kernels.errors import KernelArgumentError", []),
        ("def f():\n    from kernels.errors import Gone", ["line 2: kernels.errors.Gone"]),
        ("from tests.gone import anything", ["line 1: tests.gone.anything"]),
        ("import tests.gone", ["line 1: tests.gone"]),
        ("from protos.v1 import cache_pb2", []),
    ],
)
def test_a_name_that_is_gone_is_told(tmp_path: Path, source: str, lost: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(missing(path)) == lost


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ('m.setattr("kernels.linear.linear", 1)', []),
        ('m.setattr("kernels.linear.gone", 1)', ["line 1: kernels.linear.gone"]),
        ('from kernels import linear\nm.setattr(linear, "gone", 1)', ["line 2: kernels.linear.gone"]),
        ('import kernels.linear as linear\nm.setattr(linear, "linear", 1)', []),
        ('m.setattr("sys.argv", [])', []),
    ],
)
def test_a_replaced_name_that_is_gone_is_told(tmp_path: Path, source: str, lost: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(lost_in(path)) == lost
