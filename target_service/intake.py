"""Intake: what arrives on the links becomes outstanding items; what is wrong with one is answered at once.

The rules of the link (ARCHITECTURE.md): an item is dropped if its key, generation before committed length, is not above
that of the stream's last answer and of its outstanding item. The one exception tops up a plain run: an item without
slots, of the run's generation, whose committed length the run has passed or reached, only moves the run's end.
"""

from __future__ import annotations

import numpy as np

from outrider.engine.scheduler import Scheduler
from outrider.engine.streams import Streams
from outrider.errors import (
    DeadlineExceeded,
    InvalidArgument,
    OutriderError,
    StaleCache,
    Unavailable,
    UnknownStream,
)
from outrider.features import NOT_WANTED
from outrider.rpc.link import Attached, Delivery, Detached
from outrider.seam import VerdictBatch, VerifyBatch
from target_service.answers import Answer, Outbox
from target_service.features import FeatureKeeper
from target_service.item import Item, Stream, run_limit
from target_service.logprobs import PromptScores
from target_service.rows import Row, read_rows
from target_service.scoring import draws_dense

Message = Attached | Detached | Delivery[VerifyBatch, VerdictBatch]


class Intake:
    """The streams and outstanding items of a target service. Used in the engine thread only.

    Args:
        streams: KV and tokens.
        scheduler: told of every stream and item.
        outbox: where answers go.
        features: gives streams their rings.
        vocab: rows of the target's vocabulary.
        max_model_len: positions of a stream at most.
    """

    def __init__(
        self,
        streams: Streams,
        scheduler: Scheduler,
        outbox: Outbox,
        features: FeatureKeeper,
        *,
        vocab: int,
        max_model_len: int,
    ) -> None:
        self._streams = streams
        self._scheduler = scheduler
        self._outbox = outbox
        self._features = features
        self._vocab = vocab
        self._max_model_len = max_model_len
        self._known: dict[int, Stream] = {}

    def __getitem__(self, stream_id: int) -> Stream:
        return self._known[stream_id]

    def receive(self, message: Message) -> None:
        """Takes in a message of a link."""
        if isinstance(message, Attached):
            self._streams.attach(message.owner, message.epoch)
            self._drop_items(message.owner)
        elif isinstance(message, Detached):
            if self._streams.is_current(message.owner, message.epoch):
                self._drop_items(message.owner)
            self._streams.detach(message.owner, message.epoch)
        elif self._streams.is_current(message.owner, message.epoch):
            self._deliver(message)

    def expire(self) -> None:
        """Ends streams whose deadline, or whose coordinator's lease, has passed."""
        for stream_id in self._streams.expire():
            self._forget(stream_id, DeadlineExceeded("the stream's deadline has passed"))

    def end(self, stream_id: int, error: OutriderError) -> None:
        """Ends a stream of which nothing can be kept; its outstanding item, if any, is answered with the error."""
        stream = self._known[stream_id]
        self._streams.close(stream_id, stream.sequence.owner)
        self._forget(stream_id, error)

    def done(self, stream_id: int) -> None:
        """The outstanding item had its last answer."""
        stream = self._known[stream_id]
        assert stream.item is not None, "only outstanding items get done"
        self._outbox.finish(stream.item.link)
        self._scheduler.answered(stream_id, stream.item.proposal.slots)
        stream.item = None

    def _forget(self, stream_id: int, error: OutriderError | None) -> None:
        stream = self._known.pop(stream_id)
        self._features.release(stream.ring)
        self._scheduler.close(stream_id)
        if stream.item is None:
            return
        if error is not None:
            answer = Answer(stream_id, *stream.key, 0, status=error.status, error=str(error))
            self._outbox.add(stream.item.link, answer)
        self._outbox.finish(stream.item.link)

    def _drop_items(self, owner: bytes) -> None:
        """A link's end: nobody waits for its items any more; the streams stay for the lease."""
        for stream in self._known.values():
            if stream.sequence.owner == owner:
                self._give_up(stream)

    def _give_up(self, stream: Stream) -> None:
        """Drops a stream's outstanding item without an answer."""
        stream.run = None
        if stream.item is not None:
            self._outbox.finish(stream.item.link)
            self._scheduler.withdraw(stream.opened.stream_id)
            stream.item = None

    def _deliver(self, delivery: Delivery[VerifyBatch, VerdictBatch]) -> None:
        batch = delivery.batch
        for stream_id in batch.closed.tolist():
            if self._streams.close(stream_id, delivery.owner):
                self._forget(stream_id, None)
        failed: dict[int, OutriderError] = {}
        for opened in batch.opens:
            try:
                sequence = self._streams.open(opened, delivery.owner)
            except OutriderError as error:
                failed[opened.stream_id] = error
                continue
            known = self._known.get(opened.stream_id)
            if known is None:
                prompt = None if opened.prompt_logprobs is None else PromptScores(opened.prompt_logprobs)
                most = run_limit(opened, self._max_model_len)
                self._known[opened.stream_id] = Stream(sequence, prompt=prompt, most=most)
                self._scheduler.open(opened.stream_id, owner=delivery.owner, fork_of=opened.fork_of)
            else:
                self._give_up(known)
        is_open = [stream_id in self._known for stream_id in batch.items.stream_ids.tolist()]
        # The rows of a dense q are told apart by what each stream was opened with.
        garbled = len(batch.slots.dense_q) > 0 and any(batch.slots.per_item[~np.array(is_open, np.bool_)])
        for index, row in enumerate(read_rows(batch, self._known, self._vocab)):
            if index in delivery.refused:
                continue
            try:
                if row.stream_id in failed:
                    raise failed[row.stream_id]
                if garbled and row.slots_sent and is_open[index] and draws_dense(self._known[row.stream_id].opened):
                    raise Unavailable("its q cannot be told from that of a stream that is not open here; send it again")
                taken = self._take(row, delivery)
            except OutriderError as error:
                cached = error.cached_length if isinstance(error, StaleCache) else 0
                answer = Answer(row.stream_id, *row.key, cached, status=error.status, error=str(error))
                self._outbox.add(delivery.link, answer)
                taken = False
            if not taken:
                self._outbox.finish(delivery.link)

    def _take(self, row: Row, delivery: Delivery[VerifyBatch, VerdictBatch]) -> bool:
        """Makes a row the stream's outstanding item; False if it is dropped or already done with.

        Raises:
            OutriderError: the item's status.
        """
        stream = self._known.get(row.stream_id)
        if stream is None or stream.sequence.owner != delivery.owner:
            raise UnknownStream(f"stream {row.stream_id:016x} is not open here")
        self._check(row)
        is_new_ring = self._ready_ring(stream, row)
        limit = run_limit(stream.opened, self._max_model_len)
        if row.slots_sent == 0 and self._continues(stream, row):
            run_end = min(row.key.committed + row.run, limit)
            if stream.item is not None:
                stream.item.run_end = max(stream.item.run_end, run_end)
                stream.item.features_from = row.features_from
                return False
            if run_end <= stream.sequence.committed:
                return False
        else:
            if row.key <= max(stream.answered, stream.key):
                return False
            self._give_up(stream)
            sequence = self._streams.sync(
                row.stream_id,
                delivery.owner,
                row.key.generation,
                base=row.base,
                tokens=row.tokens,
                committed=row.key.committed,
                base_hash=row.base_hash,
            )
            if sequence is None:
                return False
            if stream.ring is not None:
                stream.ring.cut(sequence.cached)
            _ready_prompt(stream)
            sequence.tokens.extend(row.proposal.x)
            stream.run = row.key if row.slots_sent == 0 else None
            # One token at least: an item is answered, whatever limit it has reached.
            run_end = 0 if row.slots_sent else max(min(row.key.committed + row.run, limit), row.key.committed + 1)
        if is_new_ring:
            # Computed once more with the same bits, so that a draft that comes late has a window to stand on.
            kept = max(stream.sequence.committed - 1 - stream.feature_window, 0)
            stream.sequence.cached = min(stream.sequence.cached, kept)
        # A retry feeds again what it wants the logits of.
        fed_from = len(stream.sequence.tokens) - len(row.proposal.x) - 1
        self._streams.kv.rewind(stream.sequence, min(stream.sequence.cached, fed_from))
        stream.item = Item(
            delivery.link, row.key.generation, row.proposal, run_end, delivery.arrived_s, row.features_from
        )
        self._scheduler.submit(row.stream_id, stream.work(), arrived_s=delivery.arrived_s)
        return True

    def _ready_ring(self, stream: Stream, row: Row) -> bool:
        """Gives a stream whose features are wanted its ring, before the pass that fills it; whether it is a new one."""
        if row.request is None or row.features_from == NOT_WANTED:
            return False
        if stream.ring is not None and stream.ring.request == row.request:
            return False
        self._features.release(stream.ring)
        stream.ring = self._features.ring(row.request)
        return stream.ring is not None

    def _continues(self, stream: Stream, row: Row) -> bool:
        """Whether an item without slots tops up the stream's run: all its tokens are of this very run."""
        run, sequence = stream.run, stream.sequence
        if run is None or row.key.generation != run.generation:
            return False
        if not run.committed <= row.key.committed <= sequence.committed:
            return False
        known = sequence.tokens[row.base : row.key.committed]
        return known == row.tokens and sequence.hash_at(row.base) == row.base_hash

    def _check(self, row: Row) -> None:
        """
        Raises:
            InvalidArgument: naming the column.
        """
        longest = row.key.committed + row.slots_sent
        if longest > self._max_model_len:
            raise InvalidArgument(
                "committed_lengths",
                f"{row.key.committed} committed tokens and {row.slots_sent} slots exceed max_model_len "
                f"({self._max_model_len})",
            )
        outside = next((token for token in row.tokens if token >= self._vocab), None)
        if outside is not None:
            raise InvalidArgument("tokens", f"{outside} is outside the vocabulary of {self._vocab} ids")


def _ready_prompt(stream: Stream) -> None:
    """Log-probabilities of the prompt travel with the round at its end: they are kept until an item is beyond it."""
    sequence, prompt = stream.sequence, stream.prompt
    if prompt is None:
        return
    if sequence.committed > stream.opened.prompt_length:
        stream.prompt = None
    elif stream.scores_prompt and prompt.read != sequence.cached:
        # Positions whose rows were not looked at are computed once more.
        sequence.cached = 0
        prompt.restart()
