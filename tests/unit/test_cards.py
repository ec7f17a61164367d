"""What a service says of the GPUs it was given, before it downloads or loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import InvalidArgument
from outrider.local.devices import Card
from outrider.service import cards
from outrider.service.launch import check_token

GIB = 1 << 30
CARDS = tuple(Card(i, f"GPU-{i}", "NVIDIA L4", 20 * GIB, 22 * GIB, "570.10") for i in range(4))


@pytest.fixture(autouse=True)
def no_driver_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cards, "_DRIVER_FILE", tmp_path / "none")
    monkeypatch.setattr(cards, "_AMD_DEVICE", tmp_path / "none")


def test_the_line_names_driver_count_and_free_memory() -> None:
    """Guards the first thing an operator looks for in a container's log."""
    given = cards.check("auto", CARDS, {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert given is not None
    assert given.device == "auto"
    assert given.line == (
        "2 of 4 GPUs, driver 570.10: 1 NVIDIA L4 (20.0 of 22.0 GiB free), 0 NVIDIA L4 (20.0 of 22.0 GiB free)"
    )


def test_auto_on_a_single_card_is_that_card() -> None:
    """Guards a single card against the hooks that spread layers over several."""
    given = cards.check("auto", CARDS, {"CUDA_VISIBLE_DEVICES": "2"})
    assert given is not None and given.device == "cuda:0"


def test_all_cards_count_where_none_is_named() -> None:
    given = cards.check("cuda:1", CARDS, {})
    assert given is not None and given.line.startswith("4 of 4") and given.device == "cuda:1"


@pytest.mark.parametrize(
    ("available", "named", "wanted"),
    [
        (CARDS, "0,7", r"no GPU '7'.*there are: 0 \(NVIDIA L4, GPU-0\)"),
        (CARDS, "0,0", "names a card twice"),
        (CARDS, "", "hides every GPU"),
        (CARDS, "-1", "hides every GPU"),
        ((), "0", "no NVIDIA driver.*Container Toolkit.*--gpus all"),
    ],
)
def test_what_is_missing_is_said_with_what_there_is(available: tuple[Card, ...], named: str, wanted: str) -> None:
    """Guards against CUDA's own message, which comes after the download and says nothing of containers."""
    with pytest.raises(InvalidArgument, match=wanted):
        cards.check("auto", available, {"CUDA_VISIBLE_DEVICES": named})


def test_a_token_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a trace from the hub's library for a secret with the wrong owner. Root reads everything."""
    (tmp_path / "token").write_text("x")
    environ = {"HF_TOKEN_PATH": str(tmp_path / "token")}
    check_token(environ)
    check_token({"HF_TOKEN_PATH": "/nowhere"})
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InvalidArgument, match=r"HF_TOKEN_PATH: .*token cannot be read by user"):
        check_token(environ)


def test_the_cpu_needs_no_card() -> None:
    assert cards.check("cpu", (), {}) is None


def test_cards_are_numbered_as_they_are_listed() -> None:
    """Guards against a log line that names another card than the one that is used: CUDA's own order differs."""
    environ = {"PATH": "x"}
    cards.number_as_listed(environ)
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    chosen = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    cards.number_as_listed(chosen)
    assert chosen["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
