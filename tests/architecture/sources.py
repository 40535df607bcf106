"""The repository's own Python files, as the architecture tests look at them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "rpc",
    "session",
    "tier_client",
    "kernels",
    "cache_service",
    "worker_service",
    "register_qa",
    "cli",
    "adapters",
)
OTHERS = ("tests", "benchmarks")


def modules(*folders: str) -> Iterator[Path]:
    """Python files of these top folders, generated ones left out."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name and "__pycache__" not in path.parts:
                yield path


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_jit(node: ast.AST) -> bool:
    """Whether this is a function that Triton or Gluon compiles, or runs while it compiles."""
    if not isinstance(node, ast.FunctionDef):
        return False
    names = [ast.unparse(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list]
    return any(name in ("triton.jit", "gluon.jit", "gluon.constexpr_function") for name in names)


def imports(path: Path) -> Iterator[str]:
    """Full names of what a module imports, at whatever depth it does; relative imports are made absolute."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
