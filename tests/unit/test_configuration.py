"""The configuration file of all parts: what is refused, what wins over what, and that every fault is said at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.arguments import parse as parse_coordinator
from draft_service.config import parse as parse_draft
from outrider.configuration import stack
from outrider.configuration.document import BadConfiguration, parse, read
from outrider.configuration.parts import ask
from target_service.config import parse as parse_target

GOOD = """\
target:
  model: stub:markov
  max_num_seqs: 8
  gpu_memory_utilization: 1
draft:
  model: ngram
coordinator:
  target: [127.0.0.1:1, 127.0.0.1:2]
  num_speculative_tokens: 4
  port: 18000
  strict_fields: true
"""


def write(folder: Path, text: str) -> str:
    path = folder / "outrider.yaml"
    path.write_text(text)
    return str(path)


def test_each_part_takes_its_section_and_flags_win(tmp_path: Path) -> None:
    """Guards one file for all parts, and a flag for a single start."""
    path = write(tmp_path, GOOD)
    target = parse_target(["--config", path])
    assert (target.model, target.max_num_seqs, target.gpu_memory_utilization) == ("stub:markov", 8, 1.0)
    assert parse_draft(["--config", path]).is_lookup
    options = parse_coordinator(["--config", path, "--port", "7", "--gamma", "2"])
    assert options.decoder.target == ("127.0.0.1:1", "127.0.0.1:2")
    assert (options.addresses.port, options.decoder.num_speculative_tokens) == (7, 2)
    assert options.front.strict_fields
    assert parse_coordinator(["--config", path]).addresses.port == 18_000


def test_a_table_is_written_as_yaml_lists(tmp_path: Path) -> None:
    """Guards the schedule by batch size, which is JSON on the command line."""
    text = "coordinator:\n  num_speculative_tokens_per_batch_size: [[1, 4, 5], [5, 64, 0]]\n"
    options = parse_coordinator(["--config", write(tmp_path, text)])
    assert [tuple(entry) for entry in options.decoder.num_speculative_tokens_per_batch_size] == [(1, 4, 5), (5, 64, 0)]


def test_a_flag_with_the_default_value_wins_too(tmp_path: Path) -> None:
    """Guards against "not given" being guessed from "equal to the default"."""
    path = write(tmp_path, GOOD)
    assert parse_coordinator(["--config", path, "--port", "8000"]).addresses.port == 8_000
    assert parse_target(["--config", path, "--max-num-seqs", "64"]).max_num_seqs == 64


BAD = {
    "target:\n  modle: x\n": "f.yaml:2: target.modle: there is no such setting; did you mean model?",
    "target:\n  max-num-seqs: 3\n  model: x\n": "did you mean max_num_seqs?",
    "target:\n  model: x\n  port: 70000\n": "f.yaml:3: target.port: must be from 0 to 65535, got 70000",
    "target:\n  model: x\n  max_cudagraph_capture_size: 600\n": "target.max_cudagraph_capture_size: 600 is outside",
    "target:\n  model: x\n  port: '5'\n": "f.yaml:3: target.port: must be a whole number, got '5'",
    "target:\n  model: x\n  trust_remote_code: 1\n": "must be true or false",
    "target:\n  max_slots: 3\n": "target.model: is required",
    "target:\n  model: x\n  model: y\n": "f.yaml:3: target.model: is set twice",
    "target:\n  model: x\n  hf_token: abc\n": "f.yaml:3: target.hf_token: secrets come from files",
    "targets:\n  model: x\n": "f.yaml:1: targets: there is no such section; did you mean target?",
    "target: 5\n": "f.yaml:1: target: must hold settings",
    "- 1\n": "f.yaml:1: must hold sections",
    "target: {a: [\n": "is no YAML",
    "target:\n  model: !!python/object/apply:os.system [true]\n": "is no YAML",
}


@pytest.mark.parametrize(("text", "wanted"), BAD.items())
def test_what_is_wrong_is_said_with_its_line(text: str, wanted: str, tmp_path: Path) -> None:
    """Guards against a setting that is silently dropped, and against YAML that runs code."""
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(BadConfiguration) as caught:
        parse_target(["--config", str(path)])
    assert wanted in "\n".join(caught.value.faults).replace(f"{tmp_path}/", "")


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    """Guards operators against one restart per mistake: form, names, types and ranges together."""
    text = "target:\n  modle: x\n  port: 70000\n  max_slots: a\n  drain_seconds: -1\n  max_num_seqs: 0\nother: 1\n"
    with pytest.raises(BadConfiguration) as caught:
        parse_target(["--config", write(tmp_path, text)])
    said = caught.value.faults
    for key in ("other", "modle", "port", "max_slots", "drain_seconds", "max_num_seqs", "model"):
        assert sum(f".{key}:" in fault or f" {key}:" in fault for fault in said) == 1, (key, said)
    assert len(said) == 7


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("generation_config: maybe", "must be one of auto, none"),
        ("num_speculative_tokens: 99", "must be an integer from 0 to 64"),
        ("strict_fields: 3", "must be true or false"),
        ("port: no", "must be a single value"),
        ("port:", "must have a value"),
        ("host: 0.0.0.0", "is not loopback"),
        ("chat_template: /nowhere", "No such file"),
    ],
)
def test_the_coordinators_flags_and_file_share_their_rules(
    line: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_coordinator(["--config", write(tmp_path, f"coordinator:\n  {line}\n")])
    assert ended.value.code == 2
    assert wanted in capsys.readouterr().err


def test_a_part_prints_its_settings_with_their_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `outrider config show` and `check`, which ask the parts by this flag."""
    path = write(tmp_path, GOOD)
    with pytest.raises(SystemExit) as ended:
        parse_coordinator(["--config", path, "--print-config", "--gamma", "3"])
    assert ended.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert not said["faults"]
    assert said["settings"]["port"] == {"value": 18_000, "origin": f"{path}:10"}
    assert said["settings"]["num_speculative_tokens"] == {"value": 3, "origin": "flag"}
    assert said["settings"]["host"] == {"value": "127.0.0.1", "origin": "default"}


def test_a_part_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    answer = ask("target", ["--config", write(tmp_path, GOOD), "--dtype", "float32"])
    assert answer.settings["dtype"] == ("float32", "flag")
    assert answer.settings["max_num_seqs"].value == 8
    assert not answer.faults


def test_up_takes_its_options_from_the_parts_sections(tmp_path: Path) -> None:
    """Guards one file for both ways of starting; what `up` decides itself is said, not dropped."""
    extra = "  rejection_sample_method: coupled\nup:\n  target_device: '0,1'\n"
    found = stack.options(read(write(tmp_path, GOOD + extra)))
    assert not found.faults
    assert found.options == {
        "target": "stub:markov",
        "draft": "ngram",
        "port": 18_000,
        "num_speculative_tokens": "4",
        "rejection_sample_method": "coupled",
        "target_device": "0,1",
    }
    assert [text.partition(" ")[0] for text in found.overruled] == ["coordinator.target"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("up:\n  target_devise: 1\n", "f:2: up.target_devise: there is no such setting; did you mean target_device?"),
        ("up:\n  start_timeout_s: soon\n", "f:2: up.start_timeout_s: must be a number, got 'soon'"),
        ("target:\n  ssl_certfile: x\n", "go together"),
        ("target:\n  model: x\ncoordinator:\n  link_ssl_ca_certs: x\n", "go together"),
    ],
)
def test_up_says_what_is_wrong_with_its_options(text: str, wanted: str) -> None:
    assert any(wanted in fault for fault in stack.options(parse(text, "f")).faults)
