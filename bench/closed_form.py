"""A sweep of the timed stub pair against its closed form: what is missing is the system's own cost.

    outrider bench sweep --target 'stub:markov?fixed_ms=100&free_tokens=16&token_ms=5' \\
        --draft 'stub:accept?p=0.8&token_ms=10' --batch 1,8,10,12,14,15,16,32 --gamma 0,1,4 --output-len 256 --out DIR
    python bench/closed_form.py DIR

A round of gamma drafted tokens takes fixed + token x max(0, B (gamma + 1) - free) + gamma x draft, and gives E(gamma)
tokens to each of B streams. Beside the law's own E the table takes the acceptance that the run happened to have, which
removes its chance from the comparison. With other times in the names, give them here too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider.economics import LinearCost, crossover_batch, expected_tokens, tokens_per_s

_TOLERANCE = 0.05


def main() -> None:
    arguments = _arguments()
    report = json.loads((arguments.folder / "report.json").read_text())
    cost = LinearCost(arguments.fixed_ms / 1000, arguments.token_ms / 1000, arguments.free_tokens)
    draft_s = arguments.draft_ms / 1000
    print(f"{'batch':>5} {'gamma':>5} {'law':>8} {'measured':>9} {'of law':>7} {'given E':>8} {'streams/step':>13}")
    short = []
    for cell in report["cells"]:
        batch, gamma = cell["batch"], cell["gamma"]
        if gamma == "auto":
            continue
        law = tokens_per_s(batch, gamma, arguments.p, cost, draft_s * gamma)
        share = cell["output_throughput"] / law
        chance = (
            expected_tokens(cell["acceptance_given_tested"], gamma) / expected_tokens(arguments.p, gamma)
            if gamma
            else 1
        )
        together = cell["steps"]["streams_per_step"] if cell["steps"] else float("nan")
        mark = "" if share >= 1 - _TOLERANCE else "  short"
        print(
            f"{batch:5} {gamma:5} {law:8.1f} {cell['output_throughput']:9.1f} {share:7.3f} {share / chance:8.3f} "
            f"{together:13.2f}{mark}"
        )
        if mark:
            short.append(
                {"batch": batch, "gamma": gamma, "of_law": round(share, 3), "given_e": round(share / chance, 3)}
            )
    crossovers = {}
    for gamma, found in report["crossover"].items():
        if gamma != "auto":
            law = crossover_batch(arguments.p, int(gamma), cost, draft_s * int(gamma))
            crossovers[gamma] = {"law": round(law, 2), "measured": found["batch"], "interval": found["interval"]}
            print(f"crossover of gamma {gamma}: law {law:.2f}, measured {found['verdict']} {found['interval']}")
    print(json.dumps({"short": short, "crossover": crossovers}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the sweep")
    parser.add_argument("--fixed-ms", type=float, default=100.0)
    parser.add_argument("--free-tokens", type=int, default=16)
    parser.add_argument("--token-ms", type=float, default=5.0)
    parser.add_argument("--draft-ms", type=float, default=10.0)
    parser.add_argument("-p", type=float, default=0.8, help="acceptance of a slot")
    return parser.parse_args()


if __name__ == "__main__":
    main()
