"""What a running compose stack must hold; run on the host once all its services are healthy.

    docker compose -f docker-compose.cpu.yml up --build --wait
    python tests/compose/check.py --engine docker            kills the draft while requests run, starts it again

    docker compose -f docker-compose.cpu.yml -f tests/compose/no-draft.yml up --build --wait
    python tests/compose/check.py --engine docker --no-draft     for a stack whose draft was never started

Every answer is compared with the target's own greedy text, no request may fail, and drafting must be back within 5 s of
the draft's return. Standard library only. `--engine podman` is for podman-compose.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

PROMPTS = (
    "Repeat: the ferry to Gull Island leaves from pier three. The ferry to Gull Island",
    "One, two, three, four, five, six, seven, eight, nine, ten. One, two,",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return",
    "The capital of France is Paris. The capital of Italy is",
)
MAX_TOKENS = 48
WITHIN_S = 180.0
BACK_WITHIN_S = 5.0
SERIES = (
    "outrider:num_requests_running",
    "outrider:generation_tokens_total",
    'outrider:links_up{part="target"}',
    'outrider:kv_cache_usage_perc{side="target"}',
    'outrider:step_seconds_count{side="target",stage="forward"}',
)
"""What Prometheus must find at least; the file's names are OpenMetrics' own, so a scrape is a GET of /metrics."""


@dataclass
class Load:
    """Requests that run until told to stop; `texts` are compared as they come."""

    url: str
    expected: dict[str, str]
    stop: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, prompt: str) -> None:
        while not self.stop.is_set():
            try:
                text = complete(self.url, prompt, speculate=True)
            except OSError as error:
                self.failures.append(f"{prompt[:20]!r}: {error}")
                continue
            if text != self.expected[prompt]:
                self.failures.append(f"{prompt[:20]!r}: {text!r} instead of {self.expected[prompt]!r}")
            self.answered += 1


def fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=WITHIN_S) as response:
        return bytes(response.read())


def complete(url: str, prompt: str, *, speculate: bool) -> str:
    # A fixed number of drafted tokens, since the controller may well decide that a busy machine should not draft.
    speculation = {"enabled": True, "num_speculative_tokens": 4} if speculate else {"enabled": False}
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "speculative": speculation}
    return str(json.loads(fetch(url + "/v1/completions", body))["choices"][0]["text"])


def series(url: str) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    lines = fetch(url + "/metrics").decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))}


def degraded(url: str) -> list[str]:
    """Parts that /ready says are missing; fails if it is not 200."""
    return [part["part"] for part in json.loads(fetch(url + "/ready"))["degraded"]]


def wait(what: str, condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > WITHIN_S:
            raise SystemExit(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(0.2)
    return time.monotonic() - began


def container(engine: str, service: str) -> str:
    command = [
        engine,
        "ps",
        "--all",
        "--filter",
        f"label=com.docker.compose.service={service}",
        "--format",
        "{{.Names}}",
    ]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if len(names) != 1:
        raise SystemExit(f"one container of {service} expected, there are {names}")
    return names[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--engine", default="podman")
    parser.add_argument("--no-draft", action="store_true")
    parser.add_argument("--back-within-s", type=float, default=BACK_WITHIN_S, help="for machines that are busy")
    given = parser.parse_args()
    url = given.url
    model = json.loads(fetch(url + "/v1/models"))["data"][0]["id"]
    expected = {prompt: complete(url, prompt, speculate=False) for prompt in PROMPTS}
    print(f"serving {model}; plain greedy texts taken")
    check_doors(url)
    load = Load(url, expected)
    threads = [threading.Thread(target=load.run, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    try:
        if given.no_draft:
            if degraded(url) != ["draft"]:
                raise SystemExit(f"/ready should name the draft as missing, it says {degraded(url)}")
            wait("12 answers without a draft", lambda: load.answered >= 12)
        else:
            lose_draft(url, given.engine, load, given.back_within_s)
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()
    drafted = series(url)["outrider:spec_decode_num_draft_tokens_total"]
    accepted = series(url)["outrider:spec_decode_num_accepted_tokens_total"]
    print(
        f"{load.answered} answers, {len(load.failures)} failed or differ; "
        f"{accepted:.0f} of {drafted:.0f} drafted tokens accepted"
    )
    for failure in load.failures[:10]:
        print("  " + failure)
    if given.no_draft == bool(drafted):
        print("drafted tokens are not what they should be")
        return 1
    return 1 if load.failures else 0


def check_doors(url: str) -> None:
    """A chat answer as OpenAI's clients read it, and the series that Prometheus scrapes."""
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
    answer = json.loads(fetch(url + "/v1/chat/completions", body))
    if answer["object"] != "chat.completion" or not answer["choices"][0]["message"]["content"]:
        raise SystemExit(f"no chat answer: {answer}")
    found = series(url)
    if missing := [name for name in SERIES if name not in found]:
        raise SystemExit(f"/metrics lacks {', '.join(missing)}")
    if not found["outrider:generation_tokens_total"]:
        raise SystemExit("/metrics counts no tokens")


def lose_draft(url: str, engine: str, load: Load, back_within_s: float) -> None:
    """Kills the draft under load, sees that it is missed, starts it and sees that it drafts again."""
    drafts = "outrider:spec_decode_num_draft_tokens_total"
    wait("4 answers, tokens drafted", lambda: load.answered >= 4 and series(url)[drafts] > 0)
    if degraded(url):
        raise SystemExit(f"degraded from the start: {degraded(url)}")
    name = container(engine, "draft")
    subprocess.run([engine, "kill", "--signal", "KILL", name], check=True, stdout=subprocess.DEVNULL)
    missed = wait("/ready names the draft as missing", lambda: degraded(url) == ["draft"])
    before = load.answered
    wait("6 answers without the draft", lambda: load.answered >= before + 6)
    while_out = series(url)[drafts]
    subprocess.run([engine, "start", name], check=True, stdout=subprocess.DEVNULL)
    serving = wait("the draft serves", lambda: _healthy(engine, name))
    back = wait("the draft is taken up again", lambda: not degraded(url))
    wait("it drafts again", lambda: series(url)[drafts] > while_out)
    print(f"missed within {missed:.1f} s; served {serving:.1f} s after its start, taken up {back:.1f} s later")
    if back > back_within_s:
        raise SystemExit(f"the draft must be taken up within {back_within_s:g} s of its return")


def _healthy(engine: str, name: str) -> bool:
    probe = [engine, "exec", name, "python", "-m", "outrider.health", "127.0.0.1:50051"]
    return bool(re.search(": SERVING$", subprocess.run(probe, capture_output=True, text=True).stdout.strip()))


if __name__ == "__main__":
    sys.exit(main())
