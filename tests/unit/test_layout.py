"""Who sits where: seats from configurations and cards alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from outrider.errors import DoesNotFit, InvalidArgument
from outrider.local import devices, layout, suggest
from outrider.local.devices import Card
from outrider.local.layout import GIB, Footprint, Seat

BIG = Footprint(weights_bytes=40 * GIB, kv_bytes_per_token=256 * 1024)
SMALL = Footprint(weights_bytes=GIB, kv_bytes_per_token=64 * 1024)


def card(index: int, free_gib: int) -> Card:
    return Card(index, f"GPU-{index}", "H100" if free_gib > 40 else "L4", free_gib * GIB, free_gib * GIB)


def seats(available: list[Card], **changes: object) -> tuple[Seat, ...]:
    arguments: dict[str, object] = {
        "target": "big",
        "target_footprint": BIG,
        "draft": "small",
        "draft_footprint": SMALL,
        "target_device": "auto",
        "draft_device": "auto",
        "available": available,
        "cpu_free_bytes": 200 * GIB,
        "cores": 8,
        **changes,
    }
    return layout.plan(**arguments)  # type: ignore[arg-type]


def test_auto_gives_the_target_the_freest_card_and_the_draft_the_smallest_other() -> None:
    """Guards the point of splitting: the cheap card drafts."""
    target, draft = seats([card(0, 24), card(1, 80), card(2, 40)])
    assert [c.index for c in target.cards or ()] == [1]
    assert [c.index for c in draft.cards or ()] == [0]
    assert not draft.shared


def test_a_lone_card_is_shared_and_says_so() -> None:
    """Guards against a refused start on a box with one card, and against sharing in silence."""
    _, draft = seats([card(0, 80)])
    assert draft.shared and [c.index for c in draft.cards or ()] == [0]


def test_what_cannot_fit_stops_with_numbers() -> None:
    """Guards against a download of tens of gigabytes that ends in an out-of-memory error."""
    with pytest.raises(DoesNotFit, match=r"target big does not fit on GPU 0: 40\.00 GiB of weights.*may be used"):
        seats([card(0, 24)])


def test_a_pair_that_fits_alone_but_not_together_is_refused() -> None:
    """Guards the combined budget of two services on one card (field fault 73)."""
    tight = Footprint(weights_bytes=40 * GIB, kv_bytes_per_token=64 * 1024)
    with pytest.raises(DoesNotFit, match="draft small"):
        seats([card(0, 60)], draft_footprint=tight)


def test_several_cards_pool_their_memory() -> None:
    """Guards `--target-device 0,1` for a target that no single card holds."""
    target, _ = seats([card(0, 24), card(1, 24), card(2, 24)], target_device="0,1")
    assert target.device == "auto" and len(target.cards or ()) == 2


def test_on_a_box_without_cards_the_draft_gets_one_pinned_core_and_the_target_all() -> None:
    """Guards the thread layout: two processes with all cores each cost one another 40 %."""
    target, draft = seats([])
    assert target.cpus is None and draft.cpus == (7,)


def test_a_draft_without_weights_needs_no_card_and_no_core() -> None:
    """Guards n-gram drafts against being pinned beside, or charged to, the target."""
    _, draft = seats([card(0, 80)], draft="ngram", draft_footprint=Footprint())
    assert draft.cards is None and draft.cpus is None and not draft.shared and draft.kv_tokens is None


def test_no_draft_means_one_seat() -> None:
    """Guards `--draft none`."""
    assert [seat.role for seat in seats([], draft=None)] == ["target"]


def test_kv_bytes_per_token_follow_grouped_heads_and_dtype() -> None:
    """Guards the KV figure of the plan: 2 x 30 layers x 3 heads x 64 x 2 bytes for SmolLM2-135M."""
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "dtype": "bfloat16",
    }
    assert layout.footprint(config, 1000, "auto") == Footprint(1000, 23_040)
    assert layout.footprint(config, 1000, "float32") == Footprint(2000, 46_080)


def test_an_unknown_device_is_refused_with_the_list_of_cards() -> None:
    """Guards against a service that starts on a card nobody asked for (field fault 110)."""
    with pytest.raises(InvalidArgument, match=r"target-device: no GPU '7'.*0 \(L4, GPU-0\)"):
        devices.pick("target-device", "7", [card(0, 24)])
    assert devices.pick("target-device", "GPU-0", [card(0, 24)]) == (card(0, 24),)


def test_cards_are_read_as_nvidia_smi_numbers_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the parser against names with spaces and against MiB taken for bytes."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        '#!/bin/sh\necho "0, GPU-aa, NVIDIA L4, 20000, 23034, 570.10"\n'
        'echo "1, GPU-bb, NVIDIA H100 80GB HBM3, 81000, 81559, 570.10"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = devices.cards()
    assert [(c.index, c.uuid, c.name) for c in found] == [
        (0, "GPU-aa", "NVIDIA L4"),
        (1, "GPU-bb", "NVIDIA H100 80GB HBM3"),
    ]
    assert found[0].free_bytes == 20000 * 1024 * 1024
    assert found[0].driver == "570.10"


def test_the_suggested_pair_is_the_largest_that_fits_the_cards() -> None:
    """Guards the demo's last line: a command that would stop with an out-of-memory error helps nobody."""
    assert suggest.command([]) is None
    assert suggest.command([card(0, 4)]) is None
    two = suggest.command([card(0, 24), card(1, 80)])
    assert two is not None and "--target Qwen/Qwen3-32B" in two and "--target-device 1 --draft-device 0" in two
    one = suggest.command([card(0, 24)])
    assert one is not None and "--target Qwen/Qwen3-8B" in one and "--target-device 0 --draft-device 0" in one
