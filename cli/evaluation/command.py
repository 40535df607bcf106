"""`stemcache eval`: its options, and where its table, its JSON and its plot go.

run.py runs the ways of reuse.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from cli.addresses import CannotStart
from cli.app import JsonOption, app, check_choice, fail, run
from cli.cluster import ClusterOptions
from cli.evaluation.plot import eval_plot
from cli.evaluation.run import Evaluation, LeastAccuracy, as_json, evaluate
from cli.evaluation.sheets import SheetPlan
from cli.evaluation.table import eval_table
from cli.evaluation.ways import WAYS
from cli.model_to_serve import HYBRID, model_name, model_to_serve
from cli.output import Output
from cli.serve import DEVICES, DeviceOption, ModelOption, SeedOption
from cli.supervisor import ChildFailed
from register_qa import Kind

POOL_MB = 512
# Fetch whatever the tier has: an evaluation of fetched pages must not depend on whether a fetch pays.
CACHE_ENV = {"STEMCACHE_CACHE_FETCH": "always"}
KV_DTYPES = ("auto", "fp8_e4m3")
KINDS = tuple(kind.value for kind in Kind)
# Of the models in the box, over enough questions to tell.
BOXED = LeastAccuracy(one_fact=0.97, two_facts=0.90)
ENOUGH_QUESTIONS = 100
# A sibling needs an earlier request, and a small pool drops a register only for another one.
LEAST_REGISTERS = 2
# A pool that drops a register for another one keeps some pages of it: of fewer tokens more than the tenth that fetched
# rows may lack.
LEAST_TOKENS = 600
TOKENS_HELP = (
    "Tokens of a register, about. Of a shorter one a small pool keeps more than a tenth, which then is not fetched."
)


@app.command("eval")
def eval_command(
    questions: Annotated[int, typer.Option("--questions", min=4, help="Questions in all, asked in every way.")] = 200,
    registers: Annotated[
        int, typer.Option("--registers", min=LEAST_REGISTERS, help="Held-out registers that they share.")
    ] = 20,
    tokens: Annotated[int, typer.Option("--tokens", min=LEAST_TOKENS, help=TOKENS_HELP)] = 3000,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", help=f"Only questions of this kind, of {', '.join(KINDS)}; may be given several times."),
    ] = None,
    ways: Annotated[
        list[str] | None,
        typer.Option("--way", help=f"Only cold and this way, of {', '.join(WAYS)}; may be given several times."),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help=f"Keys and values in the workers' pages: {', '.join(KV_DTYPES)}.")
    ] = "auto",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write accuracy and times as an SVG.")] = None,
    model: ModelOption = "",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    json_: JsonOption = False,
) -> None:
    """Ask the same questions by every way in which a prefix can be obtained: accuracy, hits, times, same text as cold.

    Exit code 1 when a row is not what its title says, hits too little, or answers otherwise than the cold run.
    """
    for option, given, known in (("--kind", kinds, KINDS), ("--way", ways, tuple(WAYS))):
        for value in given or ():
            check_choice(option, value, known)
    check_choice("--device", device, DEVICES)
    check_choice("--kv-dtype", kv_dtype, KV_DTYPES)
    if questions < 2 * registers:
        raise typer.BadParameter(f"needs two for each of {registers} registers", param_hint="--questions")
    if plot is not None and not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
    output = Output(as_json=json_)
    folder = model_to_serve(model, seed, output)
    environ = {"STEMCACHE_WORKER_KV_DTYPE": kv_dtype}
    options = ClusterOptions(folder, device=device, pool_mb=POOL_MB, cache_env=CACHE_ENV, environ=environ)
    plan = SheetPlan(questions, registers, tokens, tuple(map(Kind, kinds or KINDS)), seed)
    least = BOXED if model in ("", HYBRID) and questions >= ENOUGH_QUESTIONS else LeastAccuracy()
    found = _evaluated(options, plan, tuple(ways or WAYS), least, output)
    output.show(eval_table(found.results, output.console.width))
    report = as_json(found, model_name(model))
    output.emit(report)
    if plot is not None:
        plot.write_text(eval_plot(report), encoding="utf-8")
    if not found.passed:
        raise typer.Exit(1)


def _evaluated(
    options: ClusterOptions, plan: SheetPlan, ways: tuple[str, ...], least: LeastAccuracy, output: Output
) -> Evaluation:
    # As Ctrl-C: every child is ended before we are.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(evaluate(options, plan, ways, least, output))
    except (ChildFailed, CannotStart, ValueError) as error:
        fail(str(error))
