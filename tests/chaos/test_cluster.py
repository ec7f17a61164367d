"""`outrider deploy` on a cluster of three nodes, beside an application of somebody else's that answers throughout."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.certs.issue import issue
from outrider.certs.names import authority
from outrider.client import Answer, Client, request
from outrider.ports import free_port
from outrider.rpc.credentials import TlsFiles, blocking_channel
from outrider.v1 import common_pb2, target_pb2_grpc
from tests.chaos.ray_cluster import HEAD, WITHIN_S, RayCluster, ray_cluster
from tests.e2e.processes import answers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_PRINTABLE = [chr(code) for code in range(32, 127)]
TEXT = "".join(random.Random(1).choices(_PRINTABLE, k=900))
SCRIPT = "tokens=" + ",".join(map(str, TEXT.encode())) + "&eos=257"
STEP_MS = 20
PAIR = ["--target", f"stub:script?{SCRIPT}&fixed_ms={STEP_MS}", "--draft", f"stub:perfect?{SCRIPT}"]
PLACES = ["--target-resources", '{"target": 1}', "--draft-resources", '{"draft": 1}']
PLACES += ["--coordinator-resources", '{"front": 0.1}']
FLAGS = ["--target-flags", "--threads 1", "--draft-flags", "--threads 1"]
FLAGS += ["--coordinator-flags", "--served-model-name scripted --num-speculative-tokens 3"]
REPLICAS = ["--target-replicas", "2", "--draft-replicas", "2", "--coordinator-replicas", "2"]


@dataclass
class Site:
    """The cluster, with somebody who keeps asking the foreign application."""

    ray: RayCluster
    port: int
    certs: Path
    asked: int = 0
    failures: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{HEAD}:{self.port}"

    def complete(self, max_tokens: int) -> httpx.Response:
        body = {"model": "scripted", "prompt": "hi", "max_tokens": max_tokens, "temperature": 0}
        return httpx.post(f"{self.url}/v1/completions", json=body, trust_env=False, timeout=WITHIN_S)

    def series(self, name: str) -> float:
        """Sum over the labels of a series, of all coordinators."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=WITHIN_S).text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    @property
    def authority(self) -> TlsFiles:
        """As a user's client has it."""
        return TlsFiles(ca_certs=str(self.certs / "ca.pem"))

    def open_streams(self, target: str) -> int:
        """Streams that the target at this address holds; asked as a coordinator asks."""
        files = TlsFiles(
            certfile=str(self.certs / "coordinator.pem"),
            keyfile=str(self.certs / "coordinator.key"),
            ca_certs=str(self.certs / "ca.pem"),
        )
        with blocking_channel(target, files, authority("target")) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            return int(stub.GetInfo(common_pb2.GetInfoRequest(), timeout=10).info.open_streams)

    def keep_asking(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.asked += 1
            if not answers(f"{self.url}/foreign", WITHIN_S):  # slow is no failure: the machine is busy with the deploy
                self.failures.append(time.monotonic())
            stop.wait(0.1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    certs = tmp_path_factory.mktemp("certs")
    issue(certs)
    with ray_cluster() as ray:
        made, stop = Site(ray, free_port(), certs), threading.Event()
        ray.start_foreign(made.port)
        asking = threading.Thread(target=made.keep_asking, args=(stop,))
        asking.start()
        try:
            yield made
        finally:
            stop.set()
            asking.join()


@pytest.fixture(scope="module")
def deployed(site: Site) -> Site:
    done = site.ray.deploy(*PAIR, *PLACES, *FLAGS, *REPLICAS, "--certs", str(site.certs))
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"serving scripted at {site.url}/v1" in done.stdout
    return site


def test_what_the_cluster_cannot_hold_is_said_with_what_it_has(site: Site) -> None:
    """Ray would wait for ever, and say nothing."""
    done = site.ray.deploy(*PAIR, *PLACES, "--target-replicas", "3", "--placement-timeout-s", "2")
    assert done.returncode == 1
    assert "no room for 3 x target with target 1 each" in done.stderr
    for node in ("127.0.0.2 has front 1", "127.0.0.3 has draft 1", "127.0.0.4 has draft 1"):
        assert node in done.stderr
    done = site.ray.deploy(*PAIR, *PLACES, "--coordinator-resources", '{"CPU": 1000}', "--placement-timeout-s", "2")
    assert done.returncode == 1
    assert "no room for 1 x coordinator with CPU 1000 each" in done.stderr
    assert "Traceback" not in done.stderr
    assert site.ray.deploy("--status").stderr.startswith("outrider: Outrider has no application 'outrider'")


def test_what_is_somebody_else_s_is_refused_and_left_alone(site: Site) -> None:
    """Serve would replace an application of the same name without a word."""
    for arguments, words in (
        (["--name", "foreign"], "a Serve application 'foreign' that is not Outrider's exists"),
        (["--route-prefix", "/foreign"], "/foreign is taken by the Serve application 'foreign'"),
        (["--remove", "--name", "foreign"], "'foreign' is not Outrider's; it is left alone"),
        (["--remove"], "Outrider has no application 'outrider'"),
    ):
        done = site.ray.deploy(*PAIR, *arguments)
        assert done.returncode == 1
        assert words in done.stderr
    assert answers(f"{site.url}/foreign")


def test_both_doors_answer_and_series_are_those_of_all_coordinators(deployed: Site) -> None:
    """A scrape that reaches another coordinator each time would show sums that fall."""
    before = deployed.series("outrider:request_success_total")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(deployed.complete, 20) for _ in range(20)]
        seen = [before]
        while not all(one.done() for one in asked) or len(seen) < 20:
            seen.append(deployed.series("outrider:request_success_total"))
    assert seen == sorted(seen)
    assert {one.result().json()["choices"][0]["text"] for one in asked} == {TEXT[:20]}
    coordinators = deployed.ray.status()["coordinators"].values()
    assert len({one["grpc"] for one in coordinators}) == 2
    for one in coordinators:
        with Client(one["grpc"], deployed.authority, authority("coordinator")) as client:
            pieces = client.generate(request("hi", max_tokens=20, temperature=0.0), Answer())
            assert "".join(piece.text for piece in pieces) == TEXT[:20]
    end = time.monotonic() + 10
    while deployed.series("outrider:request_success_total") - before < 22 and time.monotonic() < end:
        time.sleep(0.2)
    assert deployed.series("outrider:request_success_total") - before == 22
    assert deployed.series("outrider:spec_decode_num_accepted_tokens_total") > 0


def test_streams_outlive_the_node_of_their_target(deployed: Site) -> None:
    """They go on at the other replica from what is committed; the lost one is found where Ray starts it again."""
    lost = deployed.ray.status()["services"]["target/1"]
    begun, texts = [threading.Event() for _ in range(16)], [""] * 16

    def read(index: int) -> str:
        body = {"model": "scripted", "prompt": "hi", "max_tokens": 901, "temperature": 0, "stream": True}
        url = f"{deployed.url}/v1/completions"
        with httpx.stream("POST", url, json=body, trust_env=False, timeout=WITHIN_S) as response:
            reason = ""
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choice = _json(line)["choices"][0]
                    texts[index] += choice["text"]
                    reason = choice["finish_reason"] or reason
                    begun[index].set()
        return reason

    with ThreadPoolExecutor(16) as pool:
        reading = [pool.submit(read, index) for index in range(16)]
        assert all(one.wait(WITHIN_S) for one in begun)
        assert deployed.open_streams(lost["address"]) > 0
        deployed.ray.kill_node(lost["node"])
        at_kill = [len(text) for text in texts]
        reasons = [one.result() for one in reading]
    assert min(at_kill) < len(TEXT)
    assert texts == [TEXT] * 16
    assert reasons == ["stop"] * 16
    ready = httpx.get(f"{deployed.url}/ready", trust_env=False)
    assert ready.status_code == 200
    assert "target" in [part["part"] for part in ready.json()["degraded"]]

    deployed.ray.add_node(5)
    end = time.monotonic() + WITHIN_S
    while (status := deployed.ray.status())["missing"]:
        assert time.monotonic() < end, status
    assert status["services"]["target/1"]["node"] == "127.0.0.5"
    while httpx.get(f"{deployed.url}/ready", trust_env=False).json()["degraded"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert deployed.complete(20).json()["choices"][0]["text"] == TEXT[:20]


def test_a_rolling_restart_fails_nobody(deployed: Site) -> None:
    """Requests run on while all drafts, targets and coordinators are replaced, one after the other."""
    before, stop = deployed.ray.status(), threading.Event()
    texts: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            answer = deployed.complete(100)
            texts.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        done = deployed.ray.deploy("--restart")
        stop.set()
        for one in asking:
            one.result()
    assert done.returncode == 0, done.stderr + done.stdout
    assert set(texts) == {TEXT[:100]}
    after = deployed.ray.status()
    assert not after["missing"]
    assert not set(before["coordinators"]) & set(after["coordinators"])
    addresses = [{one["address"] for one in status["services"].values()} for status in (before, after)]
    assert not addresses[0] & addresses[1]


def test_a_second_deploy_of_the_same_name_is_refused(deployed: Site) -> None:
    """Serve would replace the coordinators under running answers."""
    done = deployed.ray.deploy(*PAIR, *PLACES)
    assert done.returncode == 1
    assert "outrider is deployed already" in done.stderr
    assert deployed.complete(20).status_code == 200


def test_removal_takes_its_own_and_nothing_else(deployed: Site) -> None:
    """Serve and its other application go on; resources are free again."""
    done = deployed.ray.deploy("--remove")
    assert done.returncode == 0, done.stderr
    assert deployed.complete(20).status_code == 404
    assert deployed.ray.deploy("--status").returncode == 1
    assert deployed.asked > 50
    assert not deployed.failures
    done = deployed.ray.deploy(*PAIR, *PLACES, *FLAGS)  # what was held is free, and a name can be taken again
    assert done.returncode == 0, done.stderr + done.stdout
    assert deployed.ray.deploy("--remove").returncode == 0
    assert not deployed.failures


def _json(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))
