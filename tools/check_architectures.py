"""Try the engine's start-up probe on a tiny random model of every causal-LM architecture of the installed transformers.

python tools/check_architectures.py                 print the tables of docs/models.md
python tools/check_architectures.py --write         rewrite them in docs/models.md
python tools/check_architectures.py --only llama    print what becomes of these model types (comma-separated)
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_configs import tiny_config
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.engine.invariance import check_invariance
from outrider.engine.probe import probe_replica, replica_of
from outrider.engine.support import check_supported, longest_stream
from outrider.errors import ModelRefused

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- tools/check_architectures.py: begin -->\n", "<!-- tools/check_architectures.py: end -->\n"
STEP_TOKENS = 256
KINDS = ("runs", "runs, bits depend on the batch", "refused", "not built here")


class Outcome(NamedTuple):
    """What became of one model type: one of `KINDS` and why."""

    kind: str
    reason: str


def outcome_of(model_type: str, architecture: str) -> Outcome:
    """Takes a tiny model through the checks of a start, in the order of a start."""
    try:
        check_supported(CONFIG_MAPPING[model_type](architectures=[architecture]))
        config = tiny_config(model_type)
        config.architectures = [architecture]
        check_supported(config)
    except ModelRefused as refusal:
        return Outcome("refused", _without(architecture, refusal))
    except Exception as error:  # any failure here is this script's own: no tiny configuration
        return Outcome("not built here", f"configuration: {_line(error)}")
    try:
        longest_stream(config, None)
        network = replica_of(config)
        network(input_ids=torch.arange(8)[None], use_cache=False)
    except ModelRefused as refusal:
        return Outcome("refused", _without(architecture, refusal))
    except Exception as error:
        return Outcome("not built here", f"model: {_line(error)}")
    try:
        paged = probe_replica(network)
    except ModelRefused as refusal:
        return Outcome("refused", _without(architecture, refusal))
    except Exception as error:  # the start would fail with it, so it belongs to the table
        return Outcome("refused", f"the start fails: {_line(error)}")
    try:
        verdict = check_invariance(paged, STEP_TOKENS)
    except Exception as error:
        return Outcome("refused", f"the start fails: {_line(error)}")
    return Outcome("runs", "") if verdict.invariant else Outcome("runs, bits depend on the batch", verdict.note)


def _without(architecture: str, refusal: ModelRefused) -> str:
    reason = str(refusal).removeprefix(f"{architecture}: ")
    return re.sub(r" \(relative error [^)]*\)", "", reason.partition("\n")[0])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:140]}"


def _child(pipe: Connection, model_type: str, architecture: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    pipe.send(outcome_of(model_type, architecture))


def isolated(model_type: str, architecture: str, timeout_s: float) -> Outcome:
    """`outcome_of` in a process of its own, so that a crash or a runaway loop costs one row of the table."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, model_type, architecture))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            return Outcome("not built here", f"no result after {timeout_s:.0f} s")
        return ours.recv()
    except EOFError:
        process.join()
        return Outcome("not built here", f"the process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def tables(outcomes: dict[str, Outcome]) -> str:
    """The part of docs/models.md between the marks."""
    counts = {kind: sum(outcome.kind == kind for outcome in outcomes.values()) for kind in KINDS}
    tally = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    parts = [f"transformers {version('transformers')}, {len(outcomes)} model types: {tally}.\n"]
    titles = {
        "runs": "### Runs\n",
        "runs, bits depend on the batch": "### Runs, but its bits depend on the batch\n",
        "refused": "### Refused\n",
        "not built here": "### Not tried: no tiny model could be built\n",
    }
    for kind, title in titles.items():
        reasons: dict[str, list[str]] = {}
        for model_type, outcome in sorted(outcomes.items()):
            if outcome.kind == kind:
                reasons.setdefault(outcome.reason, []).append(f"`{model_type}`")
        if not reasons:
            continue
        parts.append(title)
        if kind == "runs":
            parts.append(", ".join(reasons[""]) + "\n")
            continue
        rows = sorted(reasons.items(), key=lambda item: -len(item[1]))
        cells = "\n".join(f"| {reason.replace('|', '/')} | {', '.join(types)} |" for reason, types in rows)
        parts.append(f"| why | model types |\n|---|---|\n{cells}\n")
    return "\n".join(parts)


def write(text: str) -> None:
    """Puts the tables between the marks of the page."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def run_all(names: Iterable[str], timeout_s: float) -> dict[str, Outcome]:
    """Outcomes by model type; progress goes to stderr."""
    architectures: dict[str, Any] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = {}
    for name in names:
        architecture = architectures[name]
        outcomes[name] = isolated(name, architecture if isinstance(architecture, str) else architecture[0], timeout_s)
        print(f"{name}: {outcomes[name].kind} {outcomes[name].reason}".rstrip(), file=sys.stderr, flush=True)
    return outcomes


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite the tables of docs/models.md")
    parser.add_argument("--only", metavar="TYPES", help="model types, comma-separated; prints no table")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="per model type (default 60)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before the first fork: a forked child must not inherit a thread pool
    names = arguments.only.split(",") if arguments.only else list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = run_all(names, arguments.timeout)
    if arguments.only:
        return 0
    text = tables(outcomes)
    if arguments.write:
        write(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
