"""Requests under load while one part after the other fails.

    python -m tests.chaos.run                     a few minutes: each kind of fault once
    python -m tests.chaos.run --full              500 requests at least, each kind ten times
    python -m tests.chaos.run --kinds draft,Ray --times 3 --pair tiny --seed 7

Exit status 1 if a text was wrong, a request hung or was lost that should have survived, or a service kept something.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.chaos.faults import KINDS, Kind, Stage
from tests.chaos.load import Attempt, Load, answered_alone, questions
from tests.chaos.site import Site, site
from tests.chaos.verdict import Fault, summary, table, unexcused
from tests.unit.tiny import tiny_llama

FULL_REQUESTS, FULL_TIMES = 500, 10
CLIENTS = 5
QUESTIONS = 16
_PAUSE_S = 2.0
"""Between the recovery from one fault and the next."""
_LEASE_S = 30.0
DRAFTED = "outrider:spec_decode_num_draft_tokens_total"


class Pair(NamedTuple):
    """What is served, and how long answers are so that faults meet them."""

    target: str
    draft: str
    tokens: tuple[int, int]


@dataclass
class Plan:
    """What a run is to do with a pair; see the options.

    Attributes:
        minutes: after which no further fault begins.
    """

    requests: int
    times: int
    kinds: list[str]
    seed: int
    minutes: float = math.inf


@dataclass
class Outcome:
    """What a run found."""

    faults: list[Fault] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    summary: str = ""


def pair(name: str, folder: Path) -> Pair:
    """The stub pair with a clock, or a tiny random llama in float32 with a draft that often agrees with it."""
    if name == "stub":
        return Pair("stub:markov?fixed_ms=12", "stub:accept?p=0.8&token_ms=1", (60, 160))
    target = tiny_llama(folder / "target", vocab=300, tokenizer=True)
    draft = tiny_llama(folder / "draft", vocab=300, tokenizer=True, layers=1)
    return Pair(str(target), str(draft), (100, 250))


def chosen(words: str) -> list[str]:
    """Kinds whose name holds one of these words, separated by commas; all of them for an empty text."""
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()]
    found = [kind for kind in KINDS if not wanted or any(word in kind.lower() for word in wanted)]
    if not found:
        raise SystemExit(f"no kind of fault is called {words!r}; there are: {', '.join(KINDS)}")
    return found


async def run(made: Site, tokens: tuple[int, int], plan: Plan) -> Outcome:
    """Faults in a random order under load, until there were enough of them and of requests."""
    dice, outcome = random.Random(plan.seed), Outcome()
    asked = await answered_alone(made.http, made.url(), questions(QUESTIONS, plan.seed, tokens))
    load = Load(made.http, lambda: [made.url()], asked, plan.seed)
    load.start(CLIENTS)
    order = [name for _ in range(plan.times) for name in dice.sample(plan.kinds, len(plan.kinds))]
    ends_s = time.monotonic() + 60 * plan.minutes
    for number, name in enumerate(order):
        await asyncio.sleep(_PAUSE_S)
        if time.monotonic() > ends_s:
            print(f"{plan.minutes:g} minutes are over", flush=True)
            break
        fault = await _one(name, KINDS[name], Stage(made, load, dice))
        outcome.faults.append(fault)
        back = fault.recovered_s - fault.healed_s
        print(f"{number + 1}/{len(order)} {name}: back in {back:.1f} s {fault.complaint}", flush=True)
    await made.until(lambda: _enough(load, plan), "enough requests", 600.0)
    await load.stop()
    held = await made.held()
    began_s = time.monotonic()
    while held and time.monotonic() - began_s < _LEASE_S:
        await asyncio.sleep(0.5)
        held = await made.held()
    outcome.attempts = load.attempts
    outcome.failures = unexcused(outcome.faults, load.attempts)
    outcome.failures += [f"at the end there are still {count} {what}" for what, count in held.items()]
    outcome.summary = summary(load.attempts, held)
    return outcome


async def _enough(load: Load, plan: Plan) -> bool:
    return load.finished >= plan.requests


async def _one(name: str, kind: Kind, stage: Stage) -> Fault:
    """One fault, and the recovery from it."""
    began_s, complaints, watching = time.monotonic(), [], asyncio.Event()
    watch = asyncio.create_task(_watch_ready(stage.site, watching, complaints)) if _keeps_ready(name, kind) else None
    try:
        await kind.inject(stage)
    except AssertionError as error:
        complaints.append(str(error))
    healed_s = time.monotonic()
    try:
        await stage.site.until(stage.site.is_well, "all parts are attached", kind.recovers_s)
        if kind.drafts:
            before = await stage.site.series(DRAFTED)
            await stage.site.until(lambda: _more(stage.site, before), "tokens are drafted again", kind.recovers_s)
    except AssertionError as error:
        complaints.append(str(error))
    watching.set()
    if watch is not None:
        await watch
    return Fault(name, began_s, healed_s, time.monotonic(), "; ".join(complaints))


def _keeps_ready(name: str, kind: Kind) -> bool:
    """A draft's faults are no outage."""
    return name.startswith("draft") and not kind.excuses


async def _watch_ready(made: Site, stop: asyncio.Event, complaints: list[str]) -> None:
    while not stop.is_set():
        status, _ = await made.ready()
        if status != 200:
            complaints.append(f"/ready was {status}")
            return
        await asyncio.sleep(0.2)


async def _more(made: Site, before: float) -> bool:
    return await made.series(DRAFTED) > before


async def run_all(pairs: Sequence[str], plan: Plan, folder: Path) -> bool:
    """Each pair in turn; prints what was found; returns whether all was as it should be."""
    well, faults, attempts = True, list[Fault](), list[Attempt]()
    for name in pairs:
        made = pair(name, folder / name)
        print(f"{name} pair, seed {plan.seed}: {len(plan.kinds)} kinds, {plan.times} times each", flush=True)
        async with site(folder / name, made.target, made.draft) as stack:
            outcome = await run(stack, made.tokens, plan)
        faults += outcome.faults
        attempts += outcome.attempts
        print(f"\n{table(outcome.faults, outcome.attempts)}\n\n{outcome.summary}", flush=True)
        for line in outcome.failures:
            print(f"FAILED: {line}", flush=True)
        well = well and not outcome.failures
    if len(pairs) > 1:
        print(f"\nboth pairs\n{table(faults, attempts)}")
    print("all as it should be" if well else "NOT as it should be")
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"{FULL_REQUESTS} requests, {FULL_TIMES} times each kind")
    parser.add_argument("--requests", type=int, help="at least so many; default 50")
    parser.add_argument("--times", type=int, help="each kind so often; default 1")
    parser.add_argument("--kinds", default="", help="words of the names of kinds, separated by commas; default: all")
    parser.add_argument("--pair", choices=("stub", "tiny", "both"), default="stub", help="both: half of it each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of a pair: no further fault after so many")
    parser.add_argument("--folder", type=Path, help="for logs; default: one that is removed if all was well")
    given = parser.parse_args()
    pairs = ("stub", "tiny") if given.pair == "both" else (given.pair,)
    requests = given.requests or (FULL_REQUESTS if given.full else 50)
    times = given.times or (FULL_TIMES if given.full else 1)
    plan = Plan(-(-requests // len(pairs)), -(-times // len(pairs)), chosen(given.kinds), given.seed, given.minutes)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="outrider-chaos-"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # nothing is left behind either way
    well = asyncio.run(run_all(pairs, plan, folder))
    if well and given.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs: {folder}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
