"""`stemcache ask` against a running service: the register is cached for the second question."""

from __future__ import annotations

from cli.stage import HOLDINGS
from register_qa import Split, draw_register
from tests.cli.command import ask, stemcache
from tests.cli.conftest import Service


def test_the_second_question_finds_the_register(service: Service) -> None:
    first = ask(service.state, "ask", "--register", "41")
    second = ask(service.state, "ask", "Where is it kept?", "--register", "41")
    # One token for each byte, of which the last page's are left over.
    size = len(draw_register(41, split=Split.EVAL, holdings=HOLDINGS).text.encode())
    assert first["usage"]["cached_tokens"] == 0
    assert first["usage"]["prompt_tokens"] > size
    assert second["usage"]["cached_tokens"] >= size // 16 * 16
    assert second["question"] == "Where is it kept?"
    # Random weights know nothing; of a question that we made up, nobody knows what would be right.
    assert (first["right"], second["right"]) == (False, None)


def test_the_answer_for_people(service: Service) -> None:
    done = stemcache(service.state, "ask", "Where is [it] kept?", "--register", "42")
    assert done.returncode == 0, done.stderr
    asked, _, counts = done.stdout.rstrip("\n").split("\n")[:1] + done.stdout.rstrip("\n").split("\n")[-2:]
    assert asked == "Where is [it] kept?"
    assert "prompt tokens: 0 cached" in counts


def test_the_register_can_be_read(service: Service) -> None:
    done = stemcache(service.state, "ask", "--register", "43", "--show")
    assert " ".join(done.stdout.split()) == " ".join(
        draw_register(43, split=Split.EVAL, holdings=HOLDINGS).text.split()
    )
