"""Is a difference between two texts a near tie, or a bug? Asked of the target itself, at the first differing token.

Where a device's kernels make a row depend on its batch, two passes over one prefix differ by some noise, and a greedy
text may flip where the two best logits lie closer together than that. The target is asked for its distribution behind
the common prefix twice, on the served path: as a plain step and as the last row of a round with drafted slots. What the
two passes disagree by is the noise; a gap above it is unexplained.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from outrider.distribution import TOTAL
from outrider.errors import OutriderError, Status
from outrider.rpc import codec
from outrider.rpc.hello import Hello, hello_to_pb
from outrider.rpc.options import channel_options
from outrider.sampling import Form, SamplingParams
from outrider.seam import Items, Slots, StreamOpen, VerifyBatch, prefix_hash
from outrider.v1 import target_pb2, target_pb2_grpc

_SLOTS = 7
_TIMEOUT_S = 120.0


class Divergence(NamedTuple):
    """The first differing token of two texts.

    Attributes:
        token: index in the generated text.
        gap: difference of the two largest logits there.
        noise: largest difference of a top logit between two passes of different shapes over the same prefix.
    """

    token: int
    gap: float
    noise: float

    @property
    def explained(self) -> bool:
        """Whether it may be a near tie."""
        return self.gap <= self.noise


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ (one may just be longer), or None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def measure(target: str, prompt: Sequence[int], text: Sequence[int], token: int) -> Divergence:
    """Gap and noise at generated token `token`.

    Args:
        target: HOST:PORT of the target service.
        prompt: ids of the prompt.
        text: generated ids, right up to `token`.

    Raises:
        OutriderError: the target cannot be asked.
    """
    prefix = [*prompt, *text[:token]]
    slots = min(_SLOTS, len(prefix) - 1)
    plain = _last_row(target, prefix, [], width=0)
    in_round = _last_row(target, prefix[: len(prefix) - slots], prefix[len(prefix) - slots :], width=len(plain))
    best = np.argsort(plain)[-2:]
    return Divergence(
        token=token,
        gap=float(plain[best[1]] - plain[best[0]]),
        noise=float(np.abs(plain[best] - in_round[best]).max()),
    )


def _last_row(target: str, committed: Sequence[int], drafted: Sequence[int], *, width: int) -> NDArray[np.float64]:
    """log p behind the last drafted token, [vocabulary]; the slots' q is one-hot, in rows of `width` ids."""
    q = np.zeros((len(drafted), width), np.float32)
    q[np.arange(len(drafted)), np.array(drafted, np.int64)] = 1.0
    stream = StreamOpen(
        stream_id=secrets.randbits(63) + 1,
        prompt_length=len(committed),
        params=SamplingParams(max_tokens=len(drafted) + 1),
        form=Form.DENSE,
    )
    batch = VerifyBatch(
        items=Items(
            stream_ids=np.array([stream.stream_id], np.uint64),
            generations=np.zeros(1, np.uint32),
            committed_lengths=np.array([len(committed)], np.uint32),
            bases=np.zeros(1, np.uint32),
            prefix_hashes=np.array([prefix_hash([])], np.uint64),
            token_counts=np.array([len(committed)], np.uint32),
            tokens=np.array(committed, np.uint32),
        ),
        slots=Slots(
            per_item=np.array([len(drafted)], np.uint8),
            draft_ids=np.array(drafted, np.uint32),
            own_counts=np.full(len(drafted), TOTAL - 1, np.uint16),
            support_sizes=np.zeros(len(drafted), np.uint16),
            q_ids=np.empty(0, np.uint32),
            q_counts=np.empty(0, np.uint16),
            dense_q=q.reshape(-1),
        ),
        runs=np.array([0 if drafted else 1], np.uint16),
        opens=(stream,),
    )
    hello = Hello(coordinator_id=secrets.token_bytes(16), epoch=1)
    answered = threading.Event()

    def requests() -> Iterator[target_pb2.VerifyRequest]:
        yield target_pb2.VerifyRequest(hello=hello_to_pb(hello))
        yield codec.verify_to_pb(batch)
        answered.wait(_TIMEOUT_S)  # a link ends when its coordinator stops writing

    try:
        with grpc.insecure_channel(target, options=channel_options()) as channel:
            for message in target_pb2_grpc.TargetServiceStub(channel).Verify(requests(), timeout=_TIMEOUT_S):
                if message.replies.stream_ids:
                    verdict = codec.verdict_from_pb(message)
                    break
            else:
                raise OutriderError(f"the target at {target} ended the link without an answer")
    except grpc.RpcError as error:
        raise OutriderError(f"the target at {target}: {error.code().name}: {error.details()}") from None
    finally:
        answered.set()
    if verdict.replies.status(0) is not Status.OK:
        raise OutriderError(f"the target at {target}: {verdict.replies.errors.get(0, verdict.replies.status(0).name)}")
    rows = verdict.dense_p.reshape(len(drafted) + 1, -1)
    with np.errstate(divide="ignore"):
        return np.log(rows[-1].astype(np.float64))
