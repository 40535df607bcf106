"""The scenes themselves, over an engine and services that are scripted: what is right passes, what is wrong fails."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.conformance import scenes
from benchmarks.conformance.__main__ import line, write
from benchmarks.conformance.engine import Answer
from benchmarks.conformance.scenes import Row, Run
from benchmarks.conformance.services import Counted

PAGE_TOKENS = 32
METRIC = "tier_tokens"


@dataclass
class ScriptedServices:
    """Pages by their key, which is salt, page and text up to the page's end."""

    pages: dict[bytes, bytes] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Counted._fields, 0))
    alive: bool = True
    dropped: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.redis = self.cache = SimpleNamespace(kill=self.die, start=self.rise)

    def die(self) -> None:
        self.alive = False
        self.pages.clear()

    def rise(self) -> None:
        self.alive = True

    def counted(self) -> Counted:
        assert self.alive
        return Counted(**self.counts)

    def is_settled(self) -> bool:
        return True

    def page_keys(self) -> set[bytes]:
        return set(self.pages)

    def drop(self, key: bytes) -> bytes:
        self.dropped.add(key)
        return self.pages.pop(key)

    def damage(self, key: bytes) -> bytes:
        value, self.pages[key] = self.pages[key], b"torn"
        return value

    def put(self, key: bytes, value: bytes) -> None:
        self.pages[key] = value


@dataclass
class ScriptedEngine:
    """`fault` says what it does wrong."""

    services: ScriptedServices
    fault: str = ""
    metric: str = METRIC
    own: set[bytes] = field(default_factory=set)
    tier_tokens: int = 0

    def start(self) -> None:
        self.own.clear()

    kill = forget = start

    def counter(self, name: str) -> int:
        return self.tier_tokens if name == METRIC else 0

    def ask(self, prompt: str, salt: str, num_tokens: int) -> Answer:
        pages = (len(prompt) - 1) // PAGE_TOKENS
        named = "" if self.fault == "one namespace" else salt
        keys = [f"{named}/{page}/{prompt[: (page + 1) * PAGE_TOKENS]}".encode() for page in range(pages)]
        keys = [hashlib.sha256(key).digest() for key in keys]
        loaded = 0 if keys[0] in self.own or self.fault == "never hits" else self._load(keys)
        self.tier_tokens += loaded * PAGE_TOKENS
        self.own.update(keys)
        if self.services.alive:
            self.services.pages.update(dict.fromkeys(keys, b"page"))
        said = "no matter" if self.fault == "deaf" else prompt
        if loaded and self.fault == "wrong after a hit":
            said += "wrong"
        digest = hashlib.sha256(said.encode()).digest()
        return Answer(tuple(digest[:num_tokens]), len(prompt), 0)

    def _load(self, keys: list[bytes]) -> int:
        """Counts as granted what turns out to be damaged, as vLLM does."""
        pages, counts = self.services.pages, self.services.counts
        known = self.services.alive and keys[0] in pages
        counts["missing_pages"] += known and any(key not in pages for key in keys)
        counts["corrupt_pages"] += known and any(pages.get(key) == b"torn" for key in keys)
        return len(keys) if known else 0


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "PAUSE_S", 0.0)
    monkeypatch.setattr(scenes, "QUIET_S", 0.0)


def run(fault: str = "") -> list[Row]:
    services = ScriptedServices()
    made: Any = lambda: ScriptedEngine(services, fault)  # noqa: E731
    return list(Run(services, made, PAGE_TOKENS).rows())  # type: ignore[arg-type]


class EndsEngine(ScriptedEngine):
    """Resumes only where an earlier request has ended; a page is one token."""

    def ask(self, prompt: str, salt: str, num_tokens: int) -> Answer:
        whole = hashlib.sha256(f"{salt}/{prompt}".encode()).digest()
        ends = [hashlib.sha256(f"{salt}/{prompt[:end]}".encode()).digest() for end in range(1, len(prompt))]
        loaded = 0 if self.own & {whole, *ends} or not self.services.alive else self._load(ends)
        self.tier_tokens += loaded
        self.own.add(whole)
        if self.services.alive:
            self.services.pages[whole] = b"page"
        return Answer(tuple(hashlib.sha256(prompt.encode()).digest()[:num_tokens]), len(prompt), 0)

    def _load(self, keys: list[bytes]) -> int:
        pages, counts = self.services.pages, self.services.counts
        known = [count for count, key in enumerate(keys, 1) if key in pages]
        torn = bool(known) and pages[keys[known[-1] - 1]] == b"torn"
        counts["corrupt_pages"] += torn
        counts["missing_pages"] += not known and bool(self.services.dropped & set(keys))
        return known[-1] if known and not torn else 0


def test_an_engine_that_resumes_at_ends_of_requests_passes_with_a_tail() -> None:
    services = ScriptedServices()
    made: Any = lambda: EndsEngine(services)  # noqa: E731
    rows = list(Run(services, made, 1, tail="more").rows())  # type: ignore[arg-type]
    assert not failed(rows)
    by_scene = {row.scene: row for row in rows}
    assert by_scene["another process"].from_tier == scenes.PROMPT_CHARS
    assert by_scene["another tenant, its first time"].from_tier == 0
    assert by_scene["Redis is back"].from_tier == scenes.PROMPT_CHARS


def failed(rows: list[Row]) -> set[str]:
    return {row.scene for row in rows if not row.passed}


def test_an_engine_that_does_right_passes() -> None:
    rows = run()
    assert not failed(rows) and len(rows) >= 17
    assert {"cold", "another process", "a page is missing", "a page is torn", "Redis is back"} <= {
        r.scene for r in rows
    }


def test_other_tokens_after_a_hit_fail_each_scene_that_hits() -> None:
    rows = run("wrong after a hit")
    assert {"warm, from the tier", "another process", "four at once, from the tier"} <= failed(rows)
    assert "cold" not in failed(rows)


def test_a_tenant_that_hits_anothers_pages_fails() -> None:
    assert "another tenant, its first time" in failed(run("one namespace"))


def test_an_engine_that_never_hits_fails() -> None:
    with pytest.raises(RuntimeError, match="met none of the pages"):
        run("never hits")


def test_a_model_that_does_not_listen_is_refused() -> None:
    with pytest.raises(SystemExit, match="do not depend"):
        run("deaf")


def test_results_of_several_engines_stand_in_one_file(tmp_path: Path) -> None:
    rows = [Row("cold", True, 0, 0, Counted(lookups=1)), Row("warm", True, 384, 0, Counted())]
    path = tmp_path / "result.json"
    write(path, "one", rows)
    write(path, "two", rows[:1])
    found = json.loads(path.read_text())["engines"]
    assert [row["passed"] for row in found["one"]] == [True, False] and len(found["two"]) == 1
    assert "FAIL warm" in line(rows[1], 1.0) and "lookups=1" in line(rows[0], 1.0)
