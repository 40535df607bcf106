"""The ids in names and docstrings of tests, and in documents, are explained in docs/cases.md."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

from tests.architecture.sources import ROOT, modules, relative

CASES = ROOT / "docs/cases.md"
ROW = re.compile(r"^\| (case \d+|[EFHMR]\d+[a-c]?) \| .+ \| (`tests/.+`) \|$", re.MULTILINE)
# test_case_41_42_..., test_h4_h4b_m6_...
TEST_NAME = re.compile(r"\btest((?:_case(?:_\d+)+)?(?:_[efhmr]\d{1,2}[a-c]?)*)_")
LETTER_ID = re.compile(r"\b[EFHMR]\d{1,2}[a-c]?\b")
# "case 7", "Cases 20 and 24", "cases 1, 2 and 4"
# Of the latter, registers look like ids.
NOT_READ = ("test_cases.py", "test_machine_code.py", "test_loads_in_flight.py")
NUMBERS = re.compile(r"\b[Cc]ases? (\d+(?:(?:, | and )\d+)*)")


def ids_in(text: str) -> set[str]:
    """Returns the ids in a text as docs/cases.md writes them: "case 41", "H4b"."""
    found = set(LETTER_ID.findall(text))
    for name in TEST_NAME.findall(text):
        found.update(part[0].upper() + part[1:] for part in re.findall(r"[efhmr]\d+[a-c]?", name))
        found.update(f"case {part}" for part in re.findall(r"_(\d+)", name))
    return found | {f"case {part}" for numbers in NUMBERS.findall(text) for part in re.findall(r"\d+", numbers)}


@cache
def files_of_ids() -> dict[str, set[str]]:
    """Returns for each id the tests and documents that name it."""
    files = defaultdict(set)
    documents = [path for path in (ROOT / "docs").rglob("*.md") if path != CASES]
    for path in [*documents, *modules("tests")]:
        if path.name not in NOT_READ:
            for name in ids_in(path.read_text(encoding="utf-8")):
                files[name].add(relative(path))
    return dict(files)


def test_every_id_is_explained() -> None:
    explained = {name for name, _ in ROW.findall(CASES.read_text(encoding="utf-8"))}
    missing = {name: sorted(files) for name, files in files_of_ids().items() if name not in explained}
    assert not missing, missing


def test_each_row_names_the_tests_that_carry_its_id() -> None:
    rows = ROW.findall(CASES.read_text(encoding="utf-8"))
    assert len(rows) == len({name for name, _ in rows}) > 100
    listed = {name: set(re.findall(r"`([^`]+)`", files)) for name, files in rows}
    carried = {name: {file for file in files_of_ids().get(name, set()) if file.startswith("tests/")} for name in listed}
    wrong = {name: sorted(listed[name] ^ carried[name]) for name in listed if listed[name] != carried[name]}
    assert not wrong, wrong


def test_ids_are_read_from_names_and_texts() -> None:
    text = "def test_case_41_42_h4b_m6_all(): 'Cases 7 and 8, R17'; test_cases_pages; test_a_b1_c; H200; L2"
    assert ids_in(text) == {"case 41", "case 42", "H4b", "M6", "case 7", "case 8", "R17"}
