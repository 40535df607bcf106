"""Links between the documents lead somewhere, and the settings that they name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from cache_service.config import ENV_PREFIX as CACHE_PREFIX
from cache_service.config import CacheConfig
from tests.architecture.sources import PRODUCT, ROOT, relative
from worker_service.config import ENV_PREFIX as WORKER_PREFIX
from worker_service.config import WorkerConfig

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"STEMCACHE_(?:CACHE|WORKER)_[A-Z0-9_]+")
SPAN = re.compile(r"`([^`\s]+)`")
# A class, as `GroupLayout`.
CLASS = re.compile(r"\b[A-Z][a-z]+[A-Z]\w+")
CLASSES_OF_OTHERS = {"OffloadingSpec"}
# Stands for a name that the reader chooses.
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def anchors(path: Path) -> set[str]:
    """The names that headings get: lower case, words joined by dashes, other signs dropped."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for path in documents():
        for link in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
            if "://" in link or link.startswith("mailto:"):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(f"{relative(path)}: {link}")
    assert not broken, broken


def test_paths_in_documents_exist() -> None:
    """Whole paths from the repository's root, patterns with *, and names of single files."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    folders.discard("build")  # `make compile` makes it, in parts
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    names |= {path.name for path in ROOT.glob("*.py")}
    missing = []
    for path in documents():
        for span in SPAN.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
            if "/" in span and span.split("/")[0] in folders and not PLACEHOLDER.search(span):
                found = any(True for _ in ROOT.glob(span.rstrip("/")))
            else:
                found = not re.fullmatch(r"[\w/]+\.py", span) or span in names
            missing += [] if found else [f"{relative(path)}: {span}"]
    assert not missing, missing


def test_classes_in_documents_exist() -> None:
    """Or something else of that name: a message, an RPC, a metric's label."""
    known = set(CLASSES_OF_OTHERS)
    for folder in (*PRODUCT, "benchmarks", "protos"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(CLASS.findall(path.read_text(encoding="utf-8")))
    missing = []
    for path in documents():
        # Without the rest of a name of which three dots stand for the beginning.
        text = re.sub(r"\.\.\.\w+", "", FENCE.sub("", path.read_text(encoding="utf-8")))
        for span in re.findall(r"`([^`\n]+)`", text):
            missing += [f"{relative(path)}: {name}" for name in CLASS.findall(span) if name not in known]
    assert not missing, missing


def test_names_are_in_the_files_in_which_documents_see_them() -> None:
    """As in: `KINDS` of `cache_service/core/kinds/registry.py`. What the changelog names may be gone since."""
    pair = re.compile(r"`([A-Za-z_]\w*)`\s+(?:in|of)\s+`([\w/]+/\w+\.py)`")
    texts = [(path, path.read_text(encoding="utf-8")) for path in documents() if path.name != "CHANGELOG.md"]
    pairs = [(path, name, file) for path, text in texts for name, file in pair.findall(text)]
    assert len(pairs) > 20
    wrong = [
        f"{relative(path)}: {name} in {file}"
        for path, name, file in pairs
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not wrong, wrong


def test_every_decision_is_in_the_list() -> None:
    index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs/adr").glob("0*.md") if path.name not in index]
    assert not missing, missing


def test_the_list_of_kernels_that_a_worker_runs_is_true() -> None:
    """docs/kernels.md names each op that worker_service imports, by its name or its folder, and none as not called."""
    paragraphs = (ROOT / "docs/kernels.md").read_text(encoding="utf-8").split("\n\n")
    run, not_called = (
        {name for text in paragraphs if text.startswith(f"**What {words}") for name in SPAN.findall(text)}
        for words in ("a worker runs", "no model asks for")
    )
    (shared,) = [text for text in paragraphs if text.startswith("Shared by ops:")]
    called = set()
    for path in (ROOT / "worker_service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernels."):
                folder = str(node.module).split(".")[1]
                # Functions: what has a capital is a type or a constant. A plan is a part of its op.
                names = {
                    alias.name for alias in node.names if alias.name.islower() and not alias.name.startswith("plan_")
                }
                if (ROOT / "kernels" / folder).is_dir() and f"`{folder}`" not in shared and names:
                    called.add((folder, frozenset(names)))
    assert len(called) > 20
    missing = [folder for folder, names in called if folder not in run and not names <= run]
    assert not missing, f"not in the list of what a worker runs: {missing}"
    wrong = [name for folder, names in called for name in (folder, *names) if name in not_called]
    assert not wrong, f"a worker runs them: {wrong}"


def test_settings_in_documents_and_compose_files_exist() -> None:
    known = {f"{CACHE_PREFIX}{name}".upper() for name in CacheConfig.__dataclass_fields__}
    known |= {f"{WORKER_PREFIX}{name}".upper() for name in WorkerConfig.__dataclass_fields__}
    files = [*documents(), *ROOT.glob("Dockerfile.*"), ROOT / "docker-compose.yml"]
    used = {(relative(path), name) for path in files for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    assert used
    unknown = sorted(f"{path}: {name}" for path, name in used if name not in known and not name.endswith("_"))
    assert not unknown, unknown
