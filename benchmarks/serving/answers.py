"""Whether the tokens that were timed are the right ones: each prompt's are held against other runs of the same prompt.

Greedy tokens depend on the prompt alone, whatever runs beside it and whatever of it was cached; so every stream is
compared with what the same prompt gave before, and many of each load with a cold run by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.serving.figures import Row
from benchmarks.serving.load import cold
from benchmarks.serving.streams import Clients, Stream

# An answer of 160 tokens alone takes 0.8 s on an H200, one of 32 a fifth of that.
BRIEF_RUNS, BRIEF_TOKENS = 16, 32


class Answers:
    """The tokens of each prompt: from runs alone, and from any other run."""

    def __init__(self, clients: Clients, max_alone: int, max_tokens: int) -> None:
        """Of each load `max_alone` prompts are run alone for `max_tokens` tokens, 16 times as many for a few."""
        self._clients = clients
        self._max_alone = max_alone
        self._max_tokens = max_tokens
        self._alone: dict[bytes, list[int]] = {}
        self._seen: dict[bytes, list[int]] = {}

    async def check(self, row: Row, streams: Sequence[Stream], cached: Sequence[int] | None = None) -> None:
        """Adds to the row what is wrong with these streams. `cached`: the prompts' cached tokens, in any order."""
        row.failures += [f"stream {number}: {stream.error}" for number, stream in enumerate(streams) if stream.error]
        row.failures += [f"stream {number}: no token" for number, stream in enumerate(streams) if not stream.token_ids]
        if row.failures:
            return
        self._check_counts(row, streams, cached)
        await self._run_alone(row, streams)
        for number, stream in enumerate(streams):
            self._compare(row, number, stream)
        if not row.compared:
            row.failures.append("no stream's tokens were compared")
        answers = {tuple(stream.token_ids[: self._max_tokens]) for stream in streams}
        if len({stream.request.prompt for stream in streams}) > 1 and len(answers) == 1:
            row.failures.append("every prompt has the same answer, so equal tokens show nothing")

    def _check_counts(self, row: Row, streams: Sequence[Stream], cached: Sequence[int] | None) -> None:
        finished = [stream for stream in streams if stream.is_finished]
        for stream in finished:
            if len(stream.token_ids) != stream.request.max_tokens:
                row.failures.append(f"{len(stream.token_ids)} tokens came, not {stream.request.max_tokens}")
        found = sorted(stream.cached_tokens for stream in finished)
        if cached is not None and found != sorted(cached):
            row.failures.append(f"cached tokens of the prompts: {found}, not {sorted(cached)}")
        row.cached_tokens = found[len(found) // 2] if found else 0

    async def _run_alone(self, row: Row, streams: Sequence[Stream]) -> None:
        whole = _spread(self._max_alone, len(streams))
        briefly = _spread(BRIEF_RUNS * self._max_alone, len(streams))
        requests = []
        for number in sorted(whole | briefly):
            stream = streams[number]
            most = self._max_tokens if number in whole else min(BRIEF_TOKENS, self._max_tokens)
            num_tokens = min(len(stream.token_ids), most)
            if len(self._alone.get(stream.request.prompt, ())) < num_tokens:
                requests.append(cold(stream.request.prompt, num_tokens, "alone"))
        for alone in await self._clients.send(requests, in_turn=True) if requests else []:
            if alone.error or alone.cached_tokens:
                row.failures.append(f"a run alone: {alone.error or f'{alone.cached_tokens} tokens were cached'}")
            self._alone[alone.request.prompt] = alone.token_ids

    def _compare(self, row: Row, number: int, stream: Stream) -> None:
        prompt, tokens = stream.request.prompt, stream.token_ids
        for known in (self._alone, self._seen):
            if prompt not in known:
                continue
            length = min(len(known[prompt]), len(tokens))
            if known[prompt][:length] != tokens[:length]:
                row.failures.append(f"stream {number}: other tokens than {_where(known is self._alone)}")
        row.compared += prompt in self._alone or prompt in self._seen
        row.alone += prompt in self._alone
        if len(tokens) > len(self._seen.get(prompt, ())):
            self._seen[prompt] = tokens


def _spread(count: int, num_streams: int) -> set[int]:
    """Returns evenly spaced streams, the first and the last among them."""
    count = min(count, num_streams)
    return {round(at * (num_streams - 1) / max(count - 1, 1)) for at in range(count)}


def _where(is_alone: bool) -> str:
    return "alone and cold" if is_alone else "in another run"
