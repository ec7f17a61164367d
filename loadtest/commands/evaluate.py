"""`outrider evaluate-draft`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer

from loadtest.commands.options import needs_extra
from outrider.commands.termination import TerminationInterrupts
from outrider.errors import InvalidArgument, OutriderError

_STOPPED = 128 + signal.SIGINT
_LEAST_TOKENS = 32


def evaluate_draft(
    draft: Annotated[
        list[str], typer.Option(help="Candidate: model, `mtp`, `ngram`, `suffix`, `default`, stub:...; several.")
    ],
    target: Annotated[str, typer.Option(help="Served model.")] = "default",
    dataset: Annotated[
        Path | None, typer.Option(help="Prompts: .jsonl (Spec-Bench's format), ShareGPT .json or lines of text.")
    ] = None,
    temperature: Annotated[
        str, typer.Option(help="Temperatures; drafts are ranked by the first. Above 0 both rules are tried.")
    ] = "0,1",
    gamma: Annotated[str, typer.Option(help="Drafted tokens per round to measure, beside the best one.")] = "1,4",
    prompts: Annotated[int, typer.Option(help="Prompts, spread over the tasks.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="Number format of both models.")] = "auto",
    target_device: Annotated[str, typer.Option(help="As in `outrider up`.")] = "auto",
    draft_device: Annotated[str, typer.Option(help="As in `outrider up`.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json and evaluation.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the line of JSON and nothing else.")] = False,
) -> None:
    """Judge drafts by acceptance and cost: predicted improvement by gamma, and the measured one beside it.

    Starts each pair on this machine, one after the other. The last line on standard output is a JSON list, the best
    draft first. A draft that fails is named and left out; the others are judged all the same, and the exit code is 1.
    Ctrl-C or SIGTERM stops the services and prints what was judged by then; the exit code is 130.
    """
    needs_extra()
    from loadtest.evaluation import result as results
    from loadtest.evaluation.measure import DEPTH, Found, Pair, Setting, Stopped, evaluate
    from loadtest.evaluation.plot import draw
    from loadtest.evaluation.sample import numbers, spread
    from loadtest.prompts import load
    from loadtest.stacks import own_services
    from outrider.client import Client
    from outrider.console import err
    from outrider.console import out as console
    from outrider.local.options import StackOptions

    if prompts < 1:
        raise InvalidArgument("prompts", f"must be at least 1, got {prompts}")
    if max_tokens < _LEAST_TOKENS:
        raise InvalidArgument("max-tokens", f"must be at least {_LEAST_TOKENS}, got {max_tokens}")
    if "none" in draft:
        raise InvalidArgument("draft", "none drafts nothing; every draft is compared with plain decoding anyway")
    temperatures = numbers("temperature", temperature, 0.0, 2.0)
    gammas = [int(value) for value in numbers("gamma", gamma, 1, DEPTH, whole=True)]
    rules = ("standard", "coupled")
    settings = [Setting(t, rule) for t in temperatures for rule in (rules if t else ("greedy",))]
    chosen = spread(load("auto", dataset).prompts, prompts)

    def say(line: str) -> None:
        err.print(f"  {line}", markup=False)

    found: list[results.DraftResult] = []
    failed = stopped = False
    for name in draft:
        say(f"draft {name}")
        options = StackOptions(
            target=target,
            draft=name,
            dtype=dtype,
            target_device=target_device,
            draft_device=draft_device,
        )
        judged: list[Found] = []
        try:
            with (
                TerminationInterrupts(),
                own_services(options, say) as services,
                Client(services.grpc) as client,
            ):
                pair = Pair(client, services.url, max_tokens)
                pair.warm_up(chosen[0])
                for one in settings:
                    judged.append(evaluate(pair, chosen, one, gammas, say))
        except OutriderError as error:  # what was measured of the others cost minutes
            failed = True
            say(f"draft {name} failed: {error}")
            judged = []
        except KeyboardInterrupt as interrupt:
            stopped = True
            say(f"stopped in draft {name}, {len(judged)} of {len(settings)} settings judged; this is what there is")
            if isinstance(interrupt, Stopped):
                judged.append(interrupt.found)
                say(f"{interrupt.found.setting}: measured with {len(interrupt.found.measured[0])} of {prompts} prompts")
        if judged:
            found.append(results.DraftResult(name, tuple(judged)))
        if stopped:
            break
    best_first = results.ranked(found)
    if not as_json:
        for result in best_first:
            console.print(results.table(result))
    answer = [result.as_json() for result in best_first]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "evaluation.json").write_text(json.dumps(answer) + "\n", "utf-8")
        if answer:
            (out / "evaluation.png").write_bytes(draw(answer))
        say(f"written to {out}")
    print(json.dumps(answer))  # noqa: T201 - for programs, free of any styling
    if stopped:
        raise typer.Exit(_STOPPED)
    if failed:
        raise typer.Exit(1)
