"""The model pair: whether both can be had, speak one vocabulary, may be used, and fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider import models
from outrider.doctor.finding import Finding, ok, problem, warning
from outrider.errors import OutriderError
from outrider.fetch.reporter import megabytes
from outrider.local.layout import Seat
from outrider.vocabulary import Kind, Vocabulary, compare

_WITHOUT_WEIGHTS = (*models.LOOKUP_DRAFTS, "none")


@dataclass(frozen=True, slots=True)
class Side:
    """A model as the doctor needs it.

    Attributes:
        description: None where it cannot be had.
        findings: of having it, and of its licence.
    """

    description: models.Description | None
    findings: tuple[Finding, ...]

    @property
    def download_bytes(self) -> int:
        return 0 if self.description is None or self.description.cached else self.description.weight_bytes


def check_model(name: str, revision: str | None, role: models.Role) -> Side:
    """Looks a model up without downloading its weights."""
    try:
        found = models.describe(name, revision=revision, role=role)
    except OutriderError as error:
        return Side(None, (problem(role, str(error), "outrider models list shows what is there"),))
    size = megabytes(found.weight_bytes) if found.weight_bytes else "no weights"
    place = "" if not found.weight_bytes else ", on this machine" if found.cached else ", will be downloaded"
    findings = [ok(role, f"{found.model_id}, {size}{place}")]
    if found.licence == "unknown":
        findings.append(
            warning(f"{role} licence", "the model card names none", "read its publisher's terms before serving it")
        )
    elif found.licence:
        findings.append(ok(f"{role} licence", found.licence))
    return Side(found, tuple(findings))


def check_vocabularies(
    target: str, draft: str, sides: tuple[models.Description, models.Description], *, mismatch_allowed: bool
) -> Finding:
    """Whether the draft's ids mean what the target's do."""
    if draft in _WITHOUT_WEIGHTS:
        return ok("vocabulary", f"a draft `{draft}` has none of its own")
    missing = [side.model_id for side in sides if not side.cached]
    if missing:
        pull = "; ".join(f"outrider models pull {name}" for name in missing)
        return warning("vocabulary", f"not compared: {', '.join(missing)} is not on this machine", pull)
    try:
        compared = compare(_vocabulary(target, "target"), _vocabulary(draft, "draft"))
    except (OutriderError, OSError) as error:
        return problem("vocabulary", str(error), "take a pair whose tokenizers can be read")
    if compared.kind is Kind.DIFFERENT and not mismatch_allowed:
        return problem("vocabulary", compared.message, "take a draft of the target's family")
    if compared.kind is Kind.DIFFERENT:
        return warning("vocabulary", compared.message, "allowed, and acceptance suffers")
    return ok("vocabulary", compared.message or "the same on both sides")


def check_memory(make_plan: Callable[[], Sequence[Seat]]) -> list[Finding]:
    """The places that `outrider up` would give the parts, one finding per side."""
    try:
        seats = make_plan()
    except OutriderError as error:
        return [problem("memory", str(error), "outrider plan compares cards; a smaller model or another device fits")]
    return [_seat(seat) for seat in seats]


def _seat(seat: Seat) -> Finding:
    check = f"{seat.role} memory"
    if seat.kv_tokens is None:
        return ok(check, f"{seat.describe()}, no KV cache to plan for")
    text = f"{seat.describe()}, KV for {seat.kv_tokens:,} tokens beside the weights"
    if seat.shared and seat.cards is not None:
        return warning(
            check, f"{text}, on a card with the target", "a second card lets the draft work at the same time"
        )
    return ok(check, text)


def _vocabulary(name: str, role: models.Role) -> Vocabulary:
    """Of a model that is on this machine.

    Raises:
        ModelUnavailable, Mismatch: it has no tokenizer that can be read.
    """
    folder = models.resolve(name, role=role).folder
    return Vocabulary.stub_bytes() if folder is None else Vocabulary.from_folder(folder)
