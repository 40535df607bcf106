from __future__ import annotations

from benchmarks.token_requests import token_requests


def test_the_same_seed_gives_the_same_requests() -> None:
    assert list(token_requests(7, 30)) == list(token_requests(7, 30))
    assert list(token_requests(7, 30)) != list(token_requests(8, 30))


def test_a_token_request_goes_on_from_an_earlier_one() -> None:
    requests = list(token_requests(4, 200, num_active=8))
    histories = {request.prompt + request.output for request in requests}
    continued = sum(any(request.prompt.startswith(history) for history in histories) for request in requests)
    assert continued > len(requests) // 2
