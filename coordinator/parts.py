"""What the coordinator knows about the services it is attached to, and whether the parts fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.costs import CostProfile
from outrider.drift import View
from outrider.errors import Mismatch
from outrider.features import FeatureRequest
from outrider.rpc.cost_codec import costs_from_pb
from outrider.rpc.feature_codec import request_from_pb
from outrider.rpc.hello import negotiate
from outrider.rpc.options import NOISE_VERSION, RULE_VERSION
from outrider.rpc.tokenizer_files import BYTE_TOKENIZER
from outrider.vocabulary import Comparison, Vocabulary, compare

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo:
    """A service, its model and its device, as it describes itself; the fields are those of `ServiceInfo`."""

    build: str
    protocol_min: int
    protocol_max: int
    rule_version: int
    noise_version: int
    instance_id: str
    model_id: str
    model_revision: str
    weight_hash: str
    parameters: int
    dtype: str
    tokenizer_hash: str
    tokenizer_size: int
    vocab_rows: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_tokens: int
    block_size: int
    max_slots: int
    attention_backend: str
    device_name: str
    device_uuid: str
    batch_invariant: bool
    batch_invariance_note: str
    draft_kind: str
    hidden_size: int = 0
    num_layers: int = 0
    features: FeatureRequest | None = None
    trained_for: str = ""
    allow_planted_errors: bool = False
    costs: CostProfile | None = None
    costs_state: str = ""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    steps: int = 0
    steps_replayed: int = 0

    @property
    def arithmetic(self) -> str:
        """What was chosen of how its logits are rounded: number format, and whether passes are compiled."""
        return self.dtype + (", compiled" if "+compiled" in self.attention_backend else "")

    @classmethod
    def from_pb(cls, message: Any) -> PartInfo:
        """From an `outrider.v1.ServiceInfo`."""
        special = {"protocol_min", "protocol_max", "eos_token_ids", "features", "costs", "costs_state"}
        plain = {name: getattr(message, name) for name in cls.__dataclass_fields__ if name not in special}
        return cls(
            protocol_min=message.protocol.min,
            protocol_max=message.protocol.max,
            eos_token_ids=tuple(message.eos_token_ids),
            features=request_from_pb(message.features) if message.HasField("features") else None,
            costs=costs_from_pb(message.costs),
            costs_state=message.costs.state,
            **plain,
        )


class TargetFiles(NamedTuple):
    """The target's tokenizer files by name, against which drafts are compared."""

    files: Mapping[str, bytes]
    info: PartInfo


class Degraded(NamedTuple):
    """A part that is not doing its work, for `/ready`."""

    part: str
    reason: str
    since_s: float
    """Seconds since it stopped."""


class DecoderState(NamedTuple):
    """What the decoder is attached to now.

    Attributes:
        target: of the first target link that is up, or None.
        draft: None while no draft is attached.
        targets_up: target links that are up.
        degraded: parts that are missing or refused, with the reason.
        last_step_age_s: seconds since the last verdict, None before the first.
        max_num_seqs: streams that the targets which are up take together.
        kv_use: share of the KV blocks in use by part, over all services that are up; a part without KV is left out.
        acceptance: whether the pair's acceptance is what it was.
        replayed: share of the steps that were replayed from CUDA graphs by part, as for `kv_use`.
    """

    target: PartInfo | None
    draft: PartInfo | None
    targets_up: int
    degraded: list[Degraded]
    last_step_age_s: float | None
    max_num_seqs: int = 0
    kv_use: Mapping[str, float] = {}
    acceptance: View = View(None, None, False)
    replayed: Mapping[str, float] = {}


def kv_use(parts: Iterable[PartInfo | None]) -> float | None:
    """Share of these services' KV blocks that is in use, as they last said; None where there are no blocks."""
    known = [part for part in parts if part is not None]
    total = sum(part.kv_blocks_total for part in known)
    return sum(part.kv_blocks_used for part in known) / total if total else None


def replayed(parts: Iterable[PartInfo | None]) -> float | None:
    """Share of these services' steps since their start that were replayed from CUDA graphs; None before the first."""
    known = [part for part in parts if part is not None]
    total = sum(part.steps for part in known)
    return sum(part.steps_replayed for part in known) / total if total else None


def check_versions(part: str, info: PartInfo) -> None:
    """
    Raises:
        Mismatch: this coordinator and the service differ in protocol, rule or noise; says which side to upgrade.
    """
    negotiate(f"{part} service", info.protocol_min, info.protocol_max)
    for what, theirs, ours in (
        ("acceptance rule", info.rule_version, RULE_VERSION),
        ("noise functions", info.noise_version, NOISE_VERSION),
    ):
        if theirs != ours:
            older = f"the {part} service" if theirs < ours else "the coordinator"
            raise Mismatch(
                f"the {part} service has version {theirs} of the {what}, this coordinator {ours}: upgrade {older}"
            )


def check_features(target: PartInfo, draft: PartInfo) -> None:
    """
    Raises:
        Mismatch: the draft builds on hidden states that the target does not have.
    """
    if draft.features is None:
        return
    made_for = f" (it was trained for {draft.trained_for})" if draft.trained_for else ""
    if not target.hidden_size:
        raise Mismatch(f"it builds on hidden states, and the target ({target.model_id}) returns none")
    if draft.hidden_size != target.hidden_size or draft.vocab_rows > target.vocab_rows:
        raise Mismatch(
            f"it is made for a target with hidden states of {draft.hidden_size} and {draft.vocab_rows} ids{made_for}; "
            f"{target.model_id} has {target.hidden_size} and {target.vocab_rows}"
        )
    if max(draft.features.layers) > target.num_layers:
        raise Mismatch(
            f"it builds on layer {max(draft.features.layers)}{made_for}; {target.model_id} has {target.num_layers}"
        )


def vocabulary(files: Mapping[str, bytes], info: PartInfo) -> Vocabulary | None:
    """The vocabulary in a service's tokenizer files, or None where it has no tokenizer (n-gram drafts).

    Raises:
        Mismatch: the files hold no tokenizer that can be read.
    """
    if BYTE_TOKENIZER in files:
        return Vocabulary.stub_bytes().with_rows(info.vocab_rows)
    if TOKENIZER_FILE in files:
        return Vocabulary.from_bytes(files[TOKENIZER_FILE]).with_rows(info.vocab_rows)
    return None


def compare_files(
    target: tuple[Mapping[str, bytes], PartInfo], draft: tuple[Mapping[str, bytes], PartInfo]
) -> Comparison | None:
    """Compares the two tokenizers; None where a side has none. Takes up to a second: not for the event loop.

    Raises:
        Mismatch: a tokenizer file cannot be read.
    """
    target_vocabulary, draft_vocabulary = vocabulary(*target), vocabulary(*draft)
    if target_vocabulary is None or draft_vocabulary is None:
        return None
    return compare(target_vocabulary, draft_vocabulary)
