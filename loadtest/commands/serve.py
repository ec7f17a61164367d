"""`outrider bench serve`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest.commands.options import (
    AllowBusy,
    AllowRepeat,
    Arrival,
    Burstiness,
    Concurrency,
    DatasetName,
    DatasetPath,
    Door,
    ErrorRate,
    ExtraBody,
    IgnoreEos,
    Key,
    Model,
    OutputLen,
    Rate,
    Seed,
    Temperature,
    Trace,
    Url,
    above_zero,
    choice,
    json_object,
    needs_extra,
    not_negative,
    only_limits,
    prompt_set,
    share,
)
from outrider.api_key import headers


def bench_serve(
    context: typer.Context,
    url: Url,
    model: Model = None,
    endpoint: Door = "auto",
    api_key: Key = None,
    dataset_name: DatasetName = "auto",
    dataset_path: DatasetPath = None,
    num_prompts: Annotated[int, typer.Option(help="Requests that are measured.")] = 100,
    request_rate: Rate = None,
    burstiness: Burstiness = 1.0,
    arrival: Arrival = "poisson",
    trace: Trace = None,
    max_concurrency: Concurrency = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before them; they count nowhere.")] = 4,
    output_len: OutputLen = None,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = False,
    sampling_seed: Annotated[int | None, typer.Option(help="`seed` of the first request, counted up.")] = None,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Ask for whole answers; TTFT is then n/a.")] = False,
    extra_body: ExtraBody = None,
    goodput: Annotated[list[str] | None, typer.Option(help="Limits in ms: ttft:200 tpot:50 e2el:5000.")] = None,
    max_error_rate: ErrorRate = 0.05,
    request_timeout: Annotated[float, typer.Option(help="Seconds for an answer.")] = 600.0,
    random_input_len: Annotated[int, typer.Option(help="Words of a random prompt.")] = 64,
    allow_repeat: AllowRepeat = False,
    allow_busy: AllowBusy = False,
    seed: Seed = 0,
    ray_address: Annotated[
        str | None, typer.Option(help="Send the load from the nodes of this Ray cluster (auto, or HOST:PORT).")
    ] = None,
    generators: Annotated[int, typer.Option(help="Ray tasks that share the load.")] = 1,
    result_file: Annotated[Path | None, typer.Option(help="Also write the result here.")] = None,
) -> None:
    """Load one OpenAI-compatible server and print its figures; the last line is one JSON object."""
    needs_extra()
    from loadtest import show, slo
    from loadtest.client import discover
    from loadtest.prompts import PromptPool
    from loadtest.serve import ServeOptions, serve
    from loadtest.workload import Load, Sampling

    above_zero("request-timeout", request_timeout)
    not_negative("num-warmups", num_warmups)
    limits = slo.parse([*(goodput or []), *only_limits(context.args)])
    options = ServeOptions(
        load=Load(
            num_prompts=num_prompts,
            request_rate=request_rate,
            burstiness=burstiness,
            arrival=choice("arrival", arrival, "poisson", "constant"),
            trace=trace,
            max_concurrency=max_concurrency,
        ),
        sampling=Sampling(
            output_tokens=output_len,
            temperature=None if temperature < 0 else temperature,
            ignore_eos=ignore_eos,
            seed=sampling_seed,
            stream=not no_stream,
            extra=json_object("extra-body", extra_body),
        ),
        warmups=num_warmups,
        goodput_ms=limits,
        max_error_rate=share("max-error-rate", max_error_rate),
        allow_busy=allow_busy,
        seed=seed,
        ray_address=ray_address,
        generators=generators,
    )
    prompts = prompt_set(dataset_name, dataset_path, seed=seed, random_words=random_input_len)
    pool = PromptPool(prompts, seed=seed, allow_repeat=allow_repeat)

    async def run() -> dict[str, Any]:
        place = await discover(
            url,
            door=choice("endpoint", endpoint, "auto", "chat", "completions"),
            model=model,
            headers=headers(api_key),
        )
        with show.Requests(num_prompts) as bar:
            return await serve(
                replace(place, timeout_s=request_timeout), pool, options, on_end=bar.count, warn=show.warn
            )

    result = asyncio.run(run())
    show.figures(result)
    if result_file is not None:
        result_file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    show.last_line(result)
    if result["stopped"] or not result["completed"]:
        raise typer.Exit(1)
