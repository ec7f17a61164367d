"""The compose files and the Dockerfile, read as an engine reads them: what must hold before anything is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.arguments import parse as parse_coordinator
from draft_service.config import parse as parse_draft
from outrider.certs.issue import issue
from target_service.config import parse as parse_target

ROOT = Path(__file__).parents[2]
FILES = ("docker-compose.yml", "docker-compose.cpu.yml")
PARTS = ("target", "draft", "coordinator")
PARSERS = {"target_service": parse_target, "draft_service": parse_draft, "coordinator": parse_coordinator}


def load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text()))


def services(name: str) -> dict[str, Any]:
    return dict(load(name)["services"])


def interpolate(text: str) -> str:
    """With no variable set: `${NAME:-default}` is its default."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", PARTS)
def test_the_commands_are_ones_that_the_parts_take(name: str, part: str) -> None:
    """Guards against a flag that was renamed: a container would restart for ever."""
    module, *arguments = [interpolate(word) for word in services(name)[part]["command"]]
    PARSERS[module](arguments)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_locked_down(name: str, part: str) -> None:
    """Guards against a container that runs as root, writes to its image or keeps capabilities."""
    service = services(name)[part]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [volume.split(":")[1] for volume in service.get("volumes", [])] in ([], ["/cache"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", PARTS)
def test_a_slow_start_is_not_an_unhealthy_one(name: str, part: str) -> None:
    """Guards `up --wait` against a model that takes minutes to download and load."""
    service = services(name)[part]
    health = service["healthcheck"]
    assert int(interpolate(health["start_period"]).rstrip("s")) >= 90
    assert int(health.get("start_interval", health["interval"]).rstrip("s")) <= 5
    arguments = [interpolate(word) for word in service["command"]]
    drain_s = PARSERS[arguments[0]](arguments[1:])
    longest = getattr(drain_s, "drain_seconds", None) or drain_s.drain_timeout_s
    assert int(service["stop_grace_period"].rstrip("s")) > longest, "the engine kills a part that still drains"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_draft_does_not_hold_up_the_coordinator(name: str) -> None:
    """Guards the promise that a draft costs speed and nothing else."""
    assert services(name)["coordinator"]["depends_on"] == {
        "target": {"condition": "service_healthy"},
        "draft": {"condition": "service_started", "required": False},
    }


@pytest.mark.parametrize("name", FILES)
def test_doors_are_on_loopback_until_opened(name: str) -> None:
    """Guards against an API without a key on every address of a machine."""
    published = [port for service in services(name).values() for port in service.get("ports", [])]
    assert published
    assert all(interpolate(port).startswith("127.0.0.1:") for port in published)
    assert not any("ports" in services(name)[part] for part in ("target", "draft"))


def test_cards_are_given_to_the_services_and_to_nobody_else() -> None:
    """Guards against a Ray that counts the cards of the services as its own."""
    for part, service in services("docker-compose.yml").items():
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        wanted = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}] if part in ("target", "draft") else []
        assert devices == wanted, part
    gpus = [services("docker-compose.yml")[part]["environment"]["CUDA_VISIBLE_DEVICES"] for part in ("target", "draft")]
    assert gpus == ["${OUTRIDER_TARGET_GPUS:-0}", "${OUTRIDER_DRAFT_GPUS:-1}"]


@pytest.mark.parametrize("name", FILES)
def test_no_secret_is_in_an_environment(name: str) -> None:
    """Guards tokens against `docker inspect`."""
    for service in services(name).values():
        for variable in service.get("environment", {}):
            assert not re.search(r"(TOKEN|KEY|PASSWORD|SECRET)$", variable), variable


def test_images_are_pinned() -> None:
    """Guards against a start that differs from yesterday's."""
    images = [service["image"] for service in services("docker-compose.yml").values() if "build" not in service]
    assert images
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)
    (python,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert re.search(r":3\.\d+-slim", python)


def test_every_image_that_is_built_is_a_target_of_the_dockerfile() -> None:
    """Guards the names that both files and the documentation use."""
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    used = {service["build"]["target"] for name in FILES for service in services(name).values() if "build" in service}
    assert used == {"coordinator", "cpu", "cuda"}
    assert used <= set(stages)


def test_the_same_monitoring_in_both() -> None:
    """Guards against a second copy that falls behind."""
    for part in ("prometheus", "grafana"):
        assert services("docker-compose.cpu.yml")[part]["extends"] == {"file": "docker-compose.yml", "service": part}
    assert load("docker-compose.yml")["volumes"].keys() == load("docker-compose.cpu.yml")["volumes"].keys()


@pytest.mark.parametrize("name", FILES)
def test_the_tls_overlay_adds_flags_that_the_parts_take(name: str, tmp_path: Path) -> None:
    """Guards the overlay against commands that it replaces: the flags must come on top of either file's own."""
    issue(tmp_path)
    overlay = yaml.safe_load((ROOT / "deploy/tls/docker-compose.tls.yml").read_text())["services"]
    for part in PARTS:
        *shell, script, zero = overlay[part]["entrypoint"]
        assert (shell, zero) == (["sh", "-c"], "outrider")
        added = script.replace("/certs/", f"{tmp_path}/").split('"$$@" ')[1].split()
        module, *arguments = [interpolate(word) for word in services(name)[part]["command"]]
        made = PARSERS[module]([word for word in [*arguments, *added] if word != "--insecure"])
        assert made.decoder.tls if part == "coordinator" else made.tls
        mounted = {volume.rpartition(":/certs/")[2] for volume in overlay[part]["volumes"]}
        assert {word.rpartition("/")[2] + ":ro" for word in added} <= mounted
        assert not mounted & {f"{other}.key:ro" for other in PARTS if other != part}
