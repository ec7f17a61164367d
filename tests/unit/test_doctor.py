"""`outrider doctor`: each check from given facts, and the command's exit code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.doctor import examination, machine, pair, versions
from outrider.doctor.finding import Level
from outrider.errors import DoesNotFit
from outrider.local.devices import Card
from outrider.local.layout import GIB
from outrider.models import Description

ROOT = Path(__file__).parents[2]


def card(free: float = 70, driver: str = "580.95") -> Card:
    return Card(0, "GPU-1", "H100", int(free * GIB), 80 * GIB, driver)


def test_the_matrix_is_what_the_release_is_tested_with() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_extra = {"": project["dependencies"], **project["optional-dependencies"]}
    for row in versions.MATRIX:
        assert row.tested == pinned[row.package]
        wanted = [re.sub(r"\[\w+\]", "", line) for line in by_extra[row.extra]]
        assert f"{row.package}>={row.least}" in wanted


@pytest.mark.parametrize(
    ("found", "level"),
    [("2.13.0+cu130", Level.OK), ("2.13.4", Level.OK), ("2.14.0", Level.WARNING), ("2.12.1", Level.PROBLEM)],
)
def test_versions(found: str, level: Level) -> None:
    row = versions.Tested("torch", "2.13", "2.13.0", "services")
    (finding,) = versions.check_versions([row], lambda _: found)
    assert finding.level is level and found in finding.text


def test_a_missing_part_may_be_another_machines_but_not_what_all_need() -> None:
    torch, grpc = (versions.Tested(name, "1", "1.0", extra) for name, extra in (("torch", "services"), ("grpcio", "")))
    assert [f.level for f in versions.check_versions([torch, grpc], lambda _: None)] == [Level.WARNING, Level.PROBLEM]
    assert versions.check_python((3, 10)).level is Level.PROBLEM
    assert versions.check_python((3, 14)).level is Level.WARNING


def test_cards_in_use_are_named() -> None:
    free, busy = machine.check_cards([card(), card(free=10)], has_driver_tool=True)
    assert (free.level, busy.level) == (Level.OK, Level.WARNING)
    assert "10.0 of 80.0 GiB" in busy.text
    assert machine.check_cards([], has_driver_tool=True)[0].level is Level.WARNING
    assert machine.check_cards([], has_driver_tool=False)[0].level is Level.OK


@pytest.mark.parametrize(
    ("torch", "runtime", "driver", "level"),
    [
        ("2.13.0", "13.0.96", "580.95.05", Level.OK),
        ("2.13.0", "13.0.96", "570.86", Level.PROBLEM),
        ("2.13.0+cu126", None, "570.86", Level.OK),
        ("2.13.0+cpu", None, "580.95", Level.PROBLEM),
        ("2.13.0", None, "580.95", Level.WARNING),
    ],
)
def test_torch_and_driver_must_fit(torch: str, runtime: str | None, driver: str, level: Level) -> None:
    finding = machine.check_cuda([card(driver=driver)], torch, runtime)
    assert finding is not None and finding.level is level
    assert machine.check_cuda([], torch, runtime) is None


def test_ports_of_others_are_a_problem_and_ones_own_are_not() -> None:
    ports = [("port", "127.0.0.1", 8000), ("grpc-port", "127.0.0.1", 0)]
    busy = lambda host, port: "Address already in use" if port == 8000 else None  # noqa: E731
    stranger = machine.check_ports(ports, busy, "")
    assert stranger.level is Level.PROBLEM and "port 8000" in stranger.text
    assert machine.check_ports(ports, busy, "http://127.0.0.1:8000").level is Level.WARNING
    assert machine.check_ports(ports, lambda *_: None, "").level is Level.OK


def test_file_limit() -> None:
    levels = [machine.check_files(soft, 1 << 20).level for soft in (256, 1024, 65536, -1)]
    assert levels == [Level.PROBLEM, Level.WARNING, Level.OK, Level.OK]


def test_disk(tmp_path: Path) -> None:
    def level(free: float, needed: float) -> Level:
        return machine.check_disk(tmp_path / "cache", tmp_path, int(free * GIB), int(needed * GIB)).level

    assert [level(10, 15), level(16, 15), level(60, 15)] == [Level.PROBLEM, Level.WARNING, Level.OK]


def description(name: str, *, cached: bool = True) -> Description:
    return Description(name, "", "mit", 1000, {}, cached)


def model_folder(path: Path, tokens: dict[str, int]) -> str:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    (path / "config.json").write_text(json.dumps({"vocab_size": len(tokens)}))
    (path / "model.safetensors").write_bytes(b"")
    return str(path)


def test_vocabularies_are_compared_where_both_are_here(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "one", {"a": 0, "b": 1})
    two = model_folder(tmp_path / "two", {"b": 0, "a": 1})
    sides = (description("one"), description("two"))

    def level(target: str, draft: str, *, allowed: bool = False) -> Level:
        return pair.check_vocabularies(target, draft, sides, mismatch_allowed=allowed).level

    assert level(one, one) is Level.OK
    assert level(one, two) is Level.PROBLEM
    assert level(one, two, allowed=True) is Level.WARNING
    assert level(one, "ngram") is Level.OK
    absent = (sides[0], description("org/two", cached=False))
    finding = pair.check_vocabularies(one, "org/two", absent, mismatch_allowed=False)
    assert finding.level is Level.WARNING and "outrider models pull org/two" in finding.remedy


def test_a_model_that_cannot_be_had_and_one_without_a_licence(tmp_path: Path) -> None:
    assert pair.check_model(str(tmp_path / "nowhere"), None, "target").findings[0].level is Level.PROBLEM
    folder = model_folder(tmp_path / "one", {"a": 0})
    side = pair.check_model(folder, None, "draft")
    assert [finding.level for finding in side.findings] == [Level.OK, Level.WARNING]


def test_a_pair_that_does_not_fit() -> None:
    def refuse() -> Any:
        raise DoesNotFit("target x does not fit")

    (finding,) = pair.check_memory(refuse)
    assert finding.level is Level.PROBLEM and "does not fit" in finding.text


class TestCommand:
    def test_a_problem_is_exit_code_1(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
        monkeypatch.setattr(examination, "_taken", lambda host, port: "Address already in use")
        answer = CliRunner().invoke(app, ["doctor", "--target", "stub:markov", "--draft", "ngram", "--json"])
        body = json.loads(answer.stdout)
        assert answer.exit_code == 1 and body["worst"] == "problem"
        assert {check["check"] for check in body["checks"] if check["level"] == "problem"} == {"ports"}

    def test_the_file_counts_and_its_faults_are_listed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
        monkeypatch.setattr(examination, "_taken", lambda host, port: None)
        file = tmp_path / "stack.yaml"
        file.write_text("target:\n  model: stub:markov\ndraft:\n  model: ngram\ncoordinator:\n  port: 4711\n")
        answer = CliRunner().invoke(app, ["doctor", "--config", str(file)])
        assert answer.exit_code == 0, answer.output
        assert "port 4711" in answer.stdout and "0 problems" in answer.stdout
        file.write_text("up:\n  nonsense: 1\n")
        assert CliRunner().invoke(app, ["doctor", "--config", str(file)]).exit_code == 1
