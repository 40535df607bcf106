"""The README's lines for SGLang name what is there."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

from adapters.sglang.settings import Settings
from benchmarks.conformance.sglang import PAGE_TOKENS, command

ROOT = Path(__file__).parents[2]


def test_the_lines_for_sglang_name_the_linker_and_its_settings() -> None:
    section = (ROOT / "README.md").read_text().split("## Under SGLang")[1].split("## ")[0]
    (lines,) = section.split("```")[1::2]
    assert len(lines.strip().splitlines()) < 10
    words = shlex.split(lines.replace("\\\n", " "), comments=True)
    assert "--enable-unified-cache-external-linker" in words
    assert words[words.index("--unified-cache-external-linker-backend") + 1] == "dynamic"
    given = json.loads(words[words.index("--unified-cache-external-linker-config") + 1])
    module = ROOT.joinpath(*given["linker_module_path"].split(".")).with_suffix(".py")
    classes = [node.name for node in ast.parse(module.read_text()).body if isinstance(node, ast.ClassDef)]
    assert given["linker"] in classes
    assert Settings.read(given["linker_extra_config"]) == Settings()


def test_the_scenes_start_the_engine_with_these_lines() -> None:
    for model in PAGE_TOKENS:
        words = command("python", Path("stubs"), Path("models") / model)
        given = json.loads(words[words.index("--unified-cache-external-linker-config") + 1])
        assert given["linker"] == "StemcacheLinker"
        settings = given["linker_extra_config"]
        assert (settings.pop("cache"), settings.pop("redis")) == ("{cache}", "{redis}")
        assert Settings.read(settings).lookup_wait_s == 10.0
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert words[words.index("--page-size") + 1] == str(PAGE_TOKENS[model])
