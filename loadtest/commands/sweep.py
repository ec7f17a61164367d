"""`outrider bench sweep`."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest.commands.options import (
    AllowBusy,
    DatasetName,
    DatasetPath,
    Door,
    Key,
    Model,
    Seed,
    Temperature,
    choice,
    needs_extra,
    prompt_set,
)
from outrider.api_key import headers
from outrider.errors import InvalidArgument


def bench_sweep(
    out: Annotated[Path, typer.Option(help="Folder for report.json, schedule.json, plots and index.html.")],
    batch: Annotated[str, typer.Option(help="Streams that decode at once, separated by commas.")] = "1,2,4,8,16,32",
    gamma: Annotated[
        str, typer.Option(help="Drafted tokens per round: numbers and auto. 0 is always measured.")
    ] = "0,1,2,4,auto",
    context: Annotated[str, typer.Option(help="Prompt lengths in tokens; 0: the prompts as they are.")] = "0",
    target: Annotated[
        str | None, typer.Option(help="Served model of the services that are started; unset: the default.")
    ] = None,
    draft: Annotated[str, typer.Option(help="Draft model, ngram, or suffix.")] = "default",
    target_device: Annotated[str, typer.Option(help="GPU number, UUID, cpu or auto.")] = "auto",
    draft_device: Annotated[str, typer.Option(help="GPU number, UUID, cpu or auto.")] = "auto",
    target_cpus: Annotated[str | None, typer.Option(help="Cores of the target on the CPU: 0 or 0,1.")] = None,
    draft_cpus: Annotated[str | None, typer.Option(help="Cores of the draft on the CPU.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")] = "auto",
    url: Annotated[str | None, typer.Option(help="Sweep a running server instead; it must be Outrider.")] = None,
    model: Model = None,
    endpoint: Door = "auto",
    api_key: Key = None,
    dataset_name: DatasetName = "auto",
    dataset_path: DatasetPath = None,
    output_len: Annotated[int, typer.Option(help="Tokens of every answer, in every arm.")] = 128,
    temperature: Temperature = 0.0,
    passes: Annotated[int, typer.Option(help="Visits of each cell.")] = 3,
    interval_width: Annotated[
        float | None, typer.Option(help="Lengthen until ratio intervals are this narrow.")
    ] = None,
    max_passes: Annotated[int, typer.Option(help="But visit a cell no more often than this.")] = 10,
    min_streams: Annotated[int, typer.Option(help="Streams per visit; smaller batches run several times.")] = 4,
    price: Annotated[str | None, typer.Option(help="Price of a device hour: target=2.5,draft=0.6.")] = None,
    also: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of another sweep, to plot beside.")] = None,
    allow_busy: AllowBusy = False,
    seed: Seed = 0,
) -> None:
    """Find where speculation stops paying: batch sizes x gamma x context, each beside plain decoding.

    Writes report.json, schedule.json (for `outrider up --schedule`), plots and a page, index.html. The last line on
    standard output is one JSON object.
    """
    needs_extra()
    from loadtest import environment, page, report, show
    from loadtest.analysis import analyse
    from loadtest.cells import CellResult, parse_grid
    from loadtest.client import Endpoint, discover
    from loadtest.prompts import PromptPool
    from loadtest.stacks import Services, own_services, parse_cpus
    from loadtest.sweep import SweepOptions, sweep
    from outrider.console import say
    from outrider.local.options import StackOptions
    from outrider.planning.prices import parse_prices

    if target is not None and url is not None:
        raise InvalidArgument("target", "starts services, and --url names running ones; leave one out")
    prices = parse_prices(price)
    arms = page.read_arms(also or [])
    options = SweepOptions(
        grid=parse_grid(batch, gamma, context),
        output_tokens=output_len,
        temperature=None if temperature < 0 else temperature,
        passes=passes,
        max_passes=max_passes if interval_width is not None else passes,
        interval_width=interval_width,
        min_streams=min_streams,
        allow_busy=allow_busy,
        seed=seed,
    )
    for name, value in (("output-len", output_len), ("passes", passes), ("min-streams", min_streams)):
        if value < 1:
            raise InvalidArgument(name, f"must be at least 1, got {value}")
    named = (("target", target_cpus), ("draft", draft_cpus))
    cpus = {role: parse_cpus(f"{role}-cpus", text) for role, text in named if text is not None}
    prompts = prompt_set(dataset_name, dataset_path, seed=seed)
    pool = PromptPool(prompts, seed=seed)
    notes: list[str] = []
    if prompts.random:
        notes.append("The prompts are random text, which no draft can predict: acceptance and crossover say nothing.")
    if passes == 1:
        notes.append("Cells were visited once: intervals know the differences between streams, not between moments.")
    door = choice("endpoint", endpoint, "auto", "chat", "completions")
    before = environment.describe()

    def warn(line: str) -> None:
        notes.append(line)
        show.warn(line)

    seen: dict[Any, Any] = {}
    places: list[Endpoint] = []

    async def run(server: str) -> None:
        place = await discover(server, door=door, model=model, headers=headers(api_key))
        places.append(place)
        with show.Cells(len(options.grid.cells) * passes) as bar:

            def visited(result: CellResult) -> None:
                seen[result.cell] = result
                bar.visited(result)

            await sweep(replace(place, timeout_s=3600.0), pool, options, on_visit=visited, warn=warn)

    with ExitStack() as cleanup:
        if url is not None:
            services = Services(url, {"url": url}, has_draft_device="draft" in prices)
        else:
            stack = StackOptions(
                target=target or "default",
                draft=draft,
                target_device=target_device,
                draft_device=draft_device,
                dtype=dtype,
            )
            services = cleanup.enter_context(own_services(stack, say, cpus))
        try:
            asyncio.run(run(services.url))
        except KeyboardInterrupt:
            warn("the sweep was interrupted; this is what it had measured")
    interrupted = "the sweep was interrupted before"
    results = [seen.get(cell) or CellResult(cell, refusal=interrupted) for cell in options.grid.cells]
    analysis = analyse(results, seed=seed)
    found = report.build(
        analysis,
        workload={
            "dataset": prompts.name,
            "random_text": prompts.random,
            "prompts": len(prompts.prompts),
            "numbered_prompts": pool.numbered,
            "output_tokens": output_len,
            "temperature": temperature,
            "passes": passes,
            "min_streams": min_streams,
            "endpoint": places[0].door if places else None,
            "seed": seed,
        },
        services={"model": places[0].model if places else None, **services.description},
        environment=before | {"load_average_after": environment.describe()["load_average"]},
        prices=prices,
        has_draft_device=services.has_draft_device,
        notes=notes,
    )
    report.write(out, found)
    page.write(out, found, arms)
    show.sweep(found)
    show.last_line(
        {
            "report": str(out / "report.json"),
            "page": str(out / "index.html"),
            "verdict": found["verdict"],
            "crossover": found["crossover"],
            "schedule": found["schedule"],
        }
    )
    if not found["cells"]:
        raise typer.Exit(1)
