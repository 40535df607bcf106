"""Names that a module imports from the repository's other modules exist.

mypy reads neither tests nor benchmarks, so it sees no import there that a rename broke. Imports within functions count
too, which collecting the tests would not run: kernels are imported there. Nothing is run: it takes seconds.
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


def test_imported_names_are_there() -> None:
    found = [f"{relative(path)}, {name}" for path in modules(*PRODUCT, *OTHERS, "examples") for name in missing(path)]
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
