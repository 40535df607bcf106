"""Kinds of layers with published sizes through both services on a GPU: hits give the tokens and logprobs of a cold run.

And a page that holds another prefix is noticed.

On a CPU tests/e2e/test_kinds.py does so with small sizes, which take none of Hopper's kernels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.client import Answer, Client, unused_salt
from tests.e2e.conftest import Starter
from tests.e2e.gpu_kinds import GPU_KINDS, GpuKind
from tests.e2e.kinds import write_kind
from tests.e2e.running import Draw
from tests.e2e.sabotage import Stand, open_stand
from tests.e2e.test_index_sabotage import GROUP, index_bytes
from tests.e2e.test_kinds_sabotage import Prefix, replaced
from tests.e2e.test_reuse import check_mid_flight
from tests.redis_process import RedisProcess
from tests.worker_service.cuda_device import NEEDS_CUDA

pytestmark = [*NEEDS_CUDA, pytest.mark.slow, pytest.mark.timeout(600)]

ANSWER = 24
WORKER = {"device": "cuda", "dtype": "bfloat16", "pool_mb": 2048, "token_budget": 2048}


class Machine(NamedTuple):
    kind: GpuKind
    cache: str
    first: str
    second: str


@pytest.fixture(scope="module", params=list(GPU_KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder: Path = tmp_path_factory.mktemp("gpu") / str(request.param)
    write_kind(GPU_KINDS[request.param].kind, folder, model / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def machine(folder: Path, tmp_path_factory: pytest.TempPathFactory, redis_binary: str) -> Iterator[Machine]:
    kind = GPU_KINDS[folder.name]
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        start = Starter(tmp_path_factory.mktemp("logs"), folder, stack)
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
        tier = {"host_tier": "redis", "redis_url": redis.url, "page_tokens": kind.kind.page}
        first, second = start.workers(cache.address, 2, **WORKER, **tier, **kind.settings)
        yield Machine(kind, cache.address, first.address, second.address)


def known_of(machine: Machine, length: int) -> tuple[int, int]:
    """Returns how many tokens of a prompt are in whole pages, and how many are left."""
    whole = length // machine.kind.kind.page * machine.kind.kind.page
    return whole, length - whole


async def answer_of(client: Client, worker: str, prompt: list[int], salt: str = "") -> Answer:
    return await client.generate(worker, prompt, ANSWER, salt=salt, logprobs=True)


async def check_as_cold(client: Client, worker: str, prompt: list[int], *answers: Answer) -> None:
    """Tokens and logprobs are, to the last bit, those of a run that found nothing."""
    cold = await answer_of(client, worker, prompt, unused_salt())
    assert cold.counts == (0, 0, len(prompt)), "the cold run was not cold"
    assert len(set(cold.logprobs)) > 5, "an answer of a few logprobs in turn shows nothing"
    for answer in answers:
        assert (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs)


async def test_hits_on_one_device(client: Client, machine: Machine, draw: Draw) -> None:
    prompt = draw(machine.kind.prompt_tokens)
    first, again = [await answer_of(client, machine.first, prompt) for _ in range(2)]
    whole, rest = known_of(machine, len(prompt))
    assert [first.counts, again.counts] == [(0, 0, len(prompt)), (whole, 0, rest)]
    await check_as_cold(client, machine.first, prompt, first, again)
    branches = [prompt[:length] + draw(30) for length in (len(prompt) - 7, len(prompt) - 70)]
    hits = await asyncio.gather(*(answer_of(client, machine.first, branch) for branch in branches))
    for branch, hit in zip(branches, hits, strict=True):
        known, _ = known_of(machine, len(branch) - 30)
        assert hit.counts == (known, 0, len(branch) - known)
        await check_as_cold(client, machine.first, branch, hit)


async def test_the_other_worker_fetches(client: Client, machine: Machine, draw: Draw) -> None:
    prompt = draw(machine.kind.prompt_tokens)
    whole, rest = known_of(machine, len(prompt))
    rows = (await client.stats(machine.cache)).host_tier.num_rows + whole // machine.kind.kind.page
    first = await answer_of(client, machine.first, prompt)
    await client.until(machine.cache, lambda stats: stats.host_tier.num_rows >= rows)
    await client.idle(machine.cache)
    fetched, again = [await answer_of(client, machine.second, prompt) for _ in range(2)]
    assert [fetched.counts, again.counts] == [(0, whole, rest), (whole, 0, rest)]
    await check_as_cold(client, machine.second, prompt, first, fetched, again)


async def test_a_sibling_hits_while_the_first_still_decodes(client: Client, machine: Machine, draw: Draw) -> None:
    """338 tokens: 336 cached and 2 computed with pages of 16, 320 and 18 with 64, 256 and 82 with 128."""
    whole, rest = known_of(machine, 338)
    await check_mid_flight(client, machine.first, draw(338), (whole, 0, rest))


@pytest.fixture
async def stand(start: Starter, client: Client, folder: Path) -> AsyncIterator[Stand]:
    kind = GPU_KINDS[folder.name]
    settings = {**WORKER, **kind.settings, "page_tokens": kind.kind.page}
    async with open_stand(client, start.cache().address, folder, **settings) as opened:
        yield opened


async def test_a_page_of_another_prefix_is_noticed(folder: Path, stand: Stand, draw: Draw) -> None:
    num_pages = GPU_KINDS[folder.name].prompt_tokens // stand.pages.page_tokens
    prefix, other = (Prefix(stand, draw, num_pages) for _ in range(2))
    await prefix.compute()
    await other.compute()
    sound = await prefix.answer()
    assert sound.logprobs == (await prefix.answer_cold()).logprobs
    for group, spec in enumerate(stand.pages.specs()):
        # A sparse layer need not choose anything of one page: of groups without a window all pages are replaced.
        pages = prefix.needed(spec.window_tokens) if spec.window_tokens else range(num_pages)
        if not pages:  # a window that ends with its page
            continue
        with ExitStack() as stack:
            for page in pages:
                ids = prefix.page_ids[group][page], other.page_ids[group][page]
                stack.enter_context(replaced(stand.pages, group, *ids))
            assert (await prefix.answer()).logprobs != sound.logprobs, f"group {spec.name}"
    assert (await prefix.answer()).logprobs == sound.logprobs


async def test_index_keys_of_another_prefix_are_noticed(folder: Path, stand: Stand, draw: Draw) -> None:
    """The latents stay as they are: only which of them are chosen can change the answer."""
    if not folder.name.startswith("deepseek-v32"):
        pytest.skip("its pages have no index keys, or in a group of their own")
    prefix, other = (Prefix(stand, draw, 70) for _ in range(2))
    await prefix.compute()
    await other.compute()
    sound = await prefix.answer()
    ids, others = prefix.page_ids[GROUP], other.page_ids[GROUP]
    kept = stand.pages.read_pages(GROUP, ids).clone()
    wrong, where = kept.clone(), index_bytes(stand.pages, dim=128)
    wrong[:, where] = stand.pages.read_pages(GROUP, others)[:, where]
    stand.pages.write_pages(GROUP, ids, wrong)
    assert (await prefix.answer()).logprobs != sound.logprobs
    stand.pages.write_pages(GROUP, ids, kept)
    assert (await prefix.answer()).logprobs == sound.logprobs
