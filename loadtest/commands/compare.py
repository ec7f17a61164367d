"""`outrider bench compare`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest.commands.options import (
    AllowBusy,
    Arrival,
    Burstiness,
    Concurrency,
    DatasetName,
    DatasetPath,
    Door,
    ErrorRate,
    Key,
    OutputLen,
    Rate,
    Seed,
    Temperature,
    choice,
    json_object,
    named,
    needs_extra,
    prompt_set,
    share,
)
from outrider.api_key import headers
from outrider.errors import InvalidArgument, Unavailable


def bench_compare(
    arm: Annotated[list[str], typer.Option(help="NAME=URL of a server; several.")],
    baseline: Annotated[str, typer.Option(help="The arm that the others are divided by.")],
    arm_body: Annotated[list[str] | None, typer.Option(help="NAME=JSON: fields of this arm's requests.")] = None,
    rounds: Annotated[int, typer.Option(help="Each arm runs once in every round, in random order.")] = 5,
    num_prompts: Annotated[int, typer.Option(help="Requests of an arm in a round.")] = 32,
    request_rate: Rate = None,
    burstiness: Burstiness = 1.0,
    arrival: Arrival = "poisson",
    max_concurrency: Concurrency = None,
    endpoint: Door = "auto",
    api_key: Key = None,
    dataset_name: DatasetName = "auto",
    dataset_path: DatasetPath = None,
    output_len: OutputLen = None,
    temperature: Temperature = 0.0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end by themselves; lengths may then differ.")
    ] = False,
    max_error_rate: ErrorRate = 0.05,
    allow_busy: AllowBusy = False,
    seed: Seed = 0,
    result_file: Annotated[Path | None, typer.Option(help="Also write the result here.")] = None,
) -> None:
    """Compare servers: the same prompts, arrivals, sampling and lengths, in interleaved rounds.

    A server that refuses is a result, and the others are compared all the same.
    """
    needs_extra()
    from loadtest import show
    from loadtest.client import discover
    from loadtest.compare import Arm, CompareOptions, compare
    from loadtest.prompts import PromptPool
    from loadtest.workload import Load, Sampling

    bodies = {name: json_object("arm-body", text) for name, text in named("arm-body", arm_body or [])}
    arms = [Arm(name, url, bodies.pop(name, {})) for name, url in named("arm", arm)]
    if bodies:
        raise InvalidArgument("arm-body", f"there is no arm {', '.join(bodies)}")
    options = CompareOptions(
        baseline=baseline,
        load=Load(
            num_prompts=num_prompts,
            request_rate=request_rate,
            burstiness=burstiness,
            arrival=choice("arrival", arrival, "poisson", "constant"),
            max_concurrency=max_concurrency,
        ),
        sampling=Sampling(
            output_tokens=output_len,
            temperature=None if temperature < 0 else temperature,
            ignore_eos=not stop_at_eos,
        ),
        rounds=rounds,
        max_error_rate=share("max-error-rate", max_error_rate),
        allow_busy=allow_busy,
        seed=seed,
    )
    pool = PromptPool(prompt_set(dataset_name, dataset_path, seed=seed), seed=seed)
    door = choice("endpoint", endpoint, "auto", "chat", "completions")

    async def run() -> dict[str, Any]:
        for one in arms:
            try:
                one.endpoint = await discover(one.url, door=door, model=None, headers=headers(api_key))
            except Unavailable as error:
                one.refusal = str(error)
        with show.Requests(num_prompts * rounds * len(arms)) as bar:
            return await compare(arms, pool, options, on_end=bar.count, warn=show.warn)

    result = asyncio.run(run())
    show.comparison(result)
    if result_file is not None:
        result_file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    show.last_line(result)
    if all("refused" in one for one in result["arms"].values()):
        raise typer.Exit(1)
