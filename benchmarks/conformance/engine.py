"""An engine as a child process that speaks OpenAI's completions: started by its own command line, asked, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

START_S = 600.0
ANSWER_S = 300.0


class Answer(NamedTuple):
    """`cached_tokens` is what the engine says; after a load that failed it may still count what was granted."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Engine:
    """`reset` empties its own cache ("/path", posted to); `metric` counts tokens that came from the tier."""

    command: Sequence[str]
    port: int
    log: Path
    model: str
    reset: str
    metric: str
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Serves on return."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + START_S
        while True:
            try:
                self._get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(
                        f"the engine did not start:\n{self.log.read_text(errors='replace')[-3000:]}"
                    ) from None
                time.sleep(0.5)

    def kill(self) -> None:
        """With all processes that it has started; as by kill -9."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask(self, prompt: str, salt: str, num_tokens: int) -> Answer:
        """Greedy, so that tokens are to be equal."""
        asked = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        answer = json.loads(self._post("/v1/completions", asked))
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(tuple(answer["choices"][0]["token_ids"]), usage["prompt_tokens"], cached)

    def forget(self) -> None:
        """Empties the engine's own cache; the tier keeps what it has."""
        self._post(self.reset, {})

    def counter(self, name: str) -> int:
        """Of the engine's own metrics, since its start; 0 for one that it does not have."""
        lines = self._get("/metrics").decode().splitlines()
        return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_S) as reply:
            return bytes(reply.read())

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return bytes(reply.read())
