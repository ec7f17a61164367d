"""A thousand random requests through a real pair: is each text what it is alone, and is every KV block given back?

    python bench/random_requests.py [--requests 1000] [--seed 1] [--drafts self,near,ngram]

Target, draft and coordinator with its gRPC door run in this process; the model is a tiny random Llama in float32, and
the KV pools are so small that streams lose their blocks to others. While the requests are served, some clients go away
in the middle, and draft and target are stopped and started again in turns, on the same port. `--drafts` take equal
parts of the requests: `self` is the target's own model, `near` the same with rounded weights (some of its tokens are
wrong), `ngram` looks up in the text.

What must hold: every text that ended, its ids and the reason of its end are those of the same request alone, without
speculation, on a target of its own that shares no prefixes; every text that was left is the beginning of that; a
request fails only while a part is being started again, with a status that says why; blocks, tables, counts and index of
both pools agree after every message and step; at the end all blocks are free. What is drawn follows from `--seed`; how
the requests meet one another in the services does not. The exit status is 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.service.drawn_requests import draw
from tests.service.kv_audit import KVAudit
from tests.service.random_requests import make_models, run, total

SHOWN = 20


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    wanted, drafts, audit = draw(arguments.requests, arguments.seed), arguments.drafts.split(","), KVAudit()
    outcomes, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        for index, draft in enumerate(drafts):
            part = wanted[index :: len(drafts)]
            outcomes.append(await run(models["self"], part, models[draft], audit, restarts=arguments.restarts))
            print(f"{draft}: {len(part)} requests, {len(outcomes[-1].faults)} faults", flush=True)
    found = total(outcomes, audit)
    for fault in found.faults[:SHOWN]:
        print(f"FAULT {fault}")
    figures = {"requests": len(wanted), "seed": arguments.seed, "seconds": round(time.monotonic() - began)}
    print(json.dumps({"bench": "random_requests", **figures, "faults": len(found.faults), **found.counts}))
    return min(len(found.faults), 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drafts", default="self,near,ngram", help="separated by commas")
    parser.add_argument("--restarts", type=int, default=4, help="for each draft, of draft and target in turns")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
