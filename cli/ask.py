"""`stemcache ask`: a question about a register of the invented archive, the prefix that its questions share.

The questions are those of the model in the box; another model may fail them.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from cli.app import JsonOption, SaltOption, WorkerOption, app, run, utf8
from cli.client import Answer, sentence
from cli.message_json import to_dict
from cli.output import Output, plain
from cli.routing import generate_where_cached
from cli.stage import HOLDINGS, MAX_ANSWER_TOKENS, wording
from cli.views import counts_line
from register_qa import Question, Register, Split, draw_questions, draw_register, is_correct


@app.command()
def ask(
    question: Annotated[
        str, typer.Argument(callback=utf8, help="Such as: Where is the clay needle kept? Default: one is drawn.")
    ] = "",
    register: Annotated[int, typer.Option("--register", min=0, help="Which register it is about.")] = 1,
    show: Annotated[bool, typer.Option("--show", help="Print the register instead, to know what to ask.")] = False,
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """Ask about a register: the first question computes it, the others find it cached."""
    output = Output(as_json=json_)
    drawn = draw_register(register, split=Split.EVAL, holdings=HOLDINGS)
    if show:
        output.show_as_it_is(drawn.text)
        output.emit({"register": drawn.text})
        return
    own = None if question else _any_question(drawn)
    asked = wording(own) if own else question
    prompt = f"{drawn.text}\nQuestion: {asked}\nAnswer:"
    answer = run(generate_where_cached(worker, prompt, sentence(MAX_ANSWER_TOKENS), salt))
    right = is_correct(own, answer.text) if own else None
    output.show(*_lines(asked, answer, right))
    output.emit(
        {
            "question": asked,
            "answer": answer.text.strip(),
            "right": right,
            "first_token_s": answer.first_token_s,
            "usage": to_dict(answer.usage),
        }
    )


def _any_question(register: Register) -> Question:
    return draw_questions(register, secrets.randbelow(1 << 31), 6)[secrets.randbelow(6)]


def _lines(asked: str, answer: Answer, right: bool | None) -> tuple[str, str, str]:
    mark = {True: " [green](right)[/green]", False: " [red](wrong)[/red]", None: ""}[right]
    return f"[bold]{plain(asked)}[/bold]", f"{plain(answer.text.strip())}{mark}", counts_line(answer)
