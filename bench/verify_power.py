"""How often `outrider verify` catches each planted error, and how often it fails an honest pair.

    python bench/verify_power.py --runs 20                       its own pair, without weights
    python bench/verify_power.py --runs 3 --url http://HOST:PORT --plants none,row-shift

Every run is a whole check through the HTTP door. `failed_by_law` counts runs that the law alone fails: differing texts
would do too, but not every error shows in them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from outrider.console import Downloads, say
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan, private
from outrider.planted import PLANTS
from outrider.verify import check, stub_pair
from outrider.verify.door import Door
from outrider.verify.law import LEVEL
from outrider.verify.report import Outcome, Report

HONEST = "none"


@contextlib.contextmanager
def door(url: str | None) -> Iterator[str]:
    """The address of a coordinator that allows planted errors."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder, Downloads() as downloads:
        pair = stub_pair.write(Path(folder))
        options = StackOptions(target=pair.target, draft=pair.draft, allow_planted_errors=True)
        with private(options, make_plan(options), downloads, say) as stack:
            yield stack.state.http
            stack.supervisor.stop(10.0)


async def check_once(url: str, plant: str, samples: int) -> Report:
    planted = None if plant == HONEST else plant
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return await check.verify(Door(http, planted=planted), samples=samples, say=lambda line: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=check.SAMPLES)
    parser.add_argument("--plants", default=",".join((HONEST, *PLANTS)))
    given = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    with door(given.url) as url:
        for plant in given.plants.split(","):
            began_s = time.monotonic()
            reports = [asyncio.run(check_once(url, plant, given.samples)) for _ in range(given.runs)]
            found[plant] = {
                "runs": given.runs,
                "failed": sum(report.outcome is Outcome.FAILED for report in reports),
                "failed_by_law": sum(report.law.p_value < LEVEL for report in reports),
                "largest_p": max(report.law.p_value for report in reports),
                "smallest_p": min(report.law.p_value for report in reports),
                "tv": round(sum(report.law.tv for report in reports) / given.runs, 4),
                "detectable_tv": round(reports[0].law.detectable_tv, 4),
                "texts_differing": sum(report.unexplained for report in reports),
                "seconds_per_run": round((time.monotonic() - began_s) / given.runs, 1),
            }
            print(plant, found[plant], flush=True)
    print(json.dumps({"samples": given.samples, **found}))


if __name__ == "__main__":
    main()
