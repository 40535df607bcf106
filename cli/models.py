"""`stemcache models`: what a worker serves, as the registry of families says."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import RenderableType

from cli.addresses import CannotStart
from cli.app import JsonOption, app, fail
from cli.output import Output, table
from cli.preflight import check_packages

STORED_EXPERTS = (
    "On a GPU experts in fp8 and mxfp4 stay as they are stored, unless expert_weights is dequantised. All other "
    "weights get the model's dtype.\nfp8 of DeepSeek V4 may have its experts in mxfp4 (expert_dtype fp4)."
)


class Served(NamedTuple):
    """An architecture: the kinds of groups that its layers may need, how its weights may be stored."""

    architecture: str
    kinds: list[str]
    weight_formats: list[str]
    page_tokens: int


@app.command("models")
def models_command(json_: JsonOption = False) -> None:
    """List the architectures that a worker serves, by their names in `architectures` of config.json."""
    try:
        check_packages()
    except CannotStart as error:
        fail(str(error))
    output = Output(as_json=json_)
    served = served_architectures()
    output.show(_served_table(served), STORED_EXPERTS)
    output.emit({"models": [one._asdict() for one in served]})


def served_architectures() -> list[Served]:
    # Imports torch, which takes seconds.
    from worker_service.model.families import BY_ARCHITECTURE

    return [
        Served(
            architecture,
            [kind.name.lower() for kind in family.kinds],
            list(family.weight_formats),
            family.page_tokens,
        )
        for architecture, family in BY_ARCHITECTURE.items()
    ]


def _served_table(served: list[Served]) -> RenderableType:
    rows = [(one.architecture, ", ".join(one.kinds), ", ".join(one.weight_formats), one.page_tokens) for one in served]
    return table("", ("architecture", "groups", "weights", "page tokens"), rows, left=3)
