"""`outrider train-draft` end to end: estimate, answers, training, checkpoint and card."""

from __future__ import annotations

import json
import platform
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from outrider.errors import InvalidArgument
from outrider.models import ResolvedModel
from outrider.training.batches import batches
from outrider.training.card import Facts, HeadShape, LmShape, Shape, card
from outrider.training.fit import fit_start, fitting_rows
from outrider.training.flight import Asked
from outrider.training.generate import GenerationPlan, generate, render, stop_ids_of
from outrider.training.initial import (
    feature_layers,
    feature_scale,
    frequent_ids,
    head_config,
    initial_head,
)
from outrider.training.loop import Report, Trainer, TrainingPlan, held_out_lessons
from outrider.training.plan import Budget, Estimate, Kind, Speed, Stage, estimate
from outrider.training.prompts import BuiltinPrompts, FilePrompts, Library, Prompts
from outrider.training.pruned import LmTrainer, pruned
from outrider.training.store import Store
from outrider.training.teacher import FEATURE_WINDOW, Teacher
from outrider.training.train import HeadTrainer

_TRIAL_PROMPTS = 24
_TRIAL_TOKENS = 24
_STATE = "run.json"
_TRAINER = "trainer.pt"
_LM_TRAINER = "lm-trainer.pt"


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for.

    Attributes:
        target: The model to learn from.
        out: Folder of the finished head.
        work: Folder of shards and checkpoints.
        prompts: File of prompts; unset means the built-in set.
        budget: How much to spend.
        seed: Of everything.
        draft_vocab: Ids a head can propose.
        kind: What is trained: a head on the target's features, or a pruned copy of the target.
        layers: Of a pruned copy.
        disk_bytes: For features and distributions at most; what is beyond is computed again in every pass.
        device: Torch device.
        resume: Whether to go on with what `work` holds.
    """

    target: ResolvedModel
    out: Path
    work: Path
    prompts: Path | None
    budget: Budget
    seed: int = 0
    draft_vocab: int = 8192
    kind: Kind = Kind.EAGLE3
    layers: int = 6
    disk_bytes: int | None = None
    device: str = "cpu"
    resume: bool = False


class Events(Protocol):
    """Who watches a run."""

    def planned(self, estimate: Estimate) -> None:
        """Called once, before anything of length begins."""

    def progress(self, stage: str, share: float, detail: str) -> None:
        """A stage (`answers`, `training`) has come so far, 0 to 1."""

    def evaluated(self, report: Report) -> None:
        """Held-out acceptance was measured."""


class Run:
    """One run over a work folder; everything on disk is whole at any moment."""

    def __init__(
        self,
        options: Options,
        events: Events,
        generation: GenerationPlan | None = None,
        training: TrainingPlan | None = None,
    ) -> None:
        """Opens the work folder.

        Raises:
            InvalidArgument: it holds another run and `resume` is not set, or `resume` finds other settings.
        """
        self._options = options
        self._events = events
        self._store = Store(options.work, options.disk_bytes)
        self._generation = generation or GenerationPlan(seed=options.seed)
        self._training = training or TrainingPlan(seed=options.seed)
        self._settings = {
            "target": options.target.model_id,
            "revision": options.target.revision,
            "prompts": str(options.prompts) if options.prompts else "built in",
            "seed": options.seed,
        }
        self._generating_s = self._open()

    def __call__(self) -> None:
        """Runs to the end of the budget and writes the head to `out` (but for the stage of answers alone).

        Raises:
            InvalidArgument: there is nothing to train on.
        """
        options = self._options
        tokenizer = AutoTokenizer.from_pretrained(options.target.path, local_files_only=True)
        teacher = _teacher(options)
        self._store.recall = teacher.read
        prompts: Prompts = (
            FilePrompts(options.prompts, options.seed) if options.prompts else BuiltinPrompts(options.seed)
        )
        stage = options.budget.stage
        if stage is not Stage.TRAINING or not self._checkpoint.exists():  # going on takes no new estimate
            self._events.planned(estimate(options.budget, self._trial(teacher, tokenizer, prompts)))
        if stage is not Stage.TRAINING:
            self._answer(teacher, tokenizer, prompts)
        if stage is Stage.ANSWERS:
            return
        if not self._store.shards():
            raise InvalidArgument("work", f"{options.work} holds no answers to train on yet")
        trainer = self._trainer(teacher)
        self._train(trainer)
        if stage is Stage.TRAINING:  # another process may have answered meanwhile
            self._generating_s = self._open()
        trainer.finish(options.out, options.target.model_id)
        (options.out / "README.md").write_text(card(self._facts(trainer)), encoding="utf-8")

    def _answer(self, teacher: Teacher, tokenizer: Any, prompts: Prompts) -> None:
        budget = self._options.budget
        tokens = sum(self._store.info(path).tokens for path in self._store.shards())
        if budget.generated(self._generating_s, tokens) >= 1:
            return
        began = time.monotonic()
        for info in generate(teacher, tokenizer, prompts, self._store, self._generation):
            tokens += info.tokens
            self._generating_s, began = self._generating_s + time.monotonic() - began, time.monotonic()
            self._remember()
            share = budget.generated(self._generating_s, tokens)
            self._events.progress("answers", min(1.0, share), f"{tokens:,} tokens")
            if share >= 1:
                return

    def _train(self, trainer: Trainer) -> None:
        budget, path = self._options.budget, self._checkpoint

        def progress() -> float:
            share = budget.trained(self._generating_s, trainer.seconds, trainer.tokens)
            self._events.progress("training", min(1.0, share), f"{trainer.tokens:,} tokens")
            return share

        try:
            for report in trainer.train(self._store, held_out_lessons(self._store), progress):
                trainer.save(path)
                self._events.evaluated(report)
        except KeyboardInterrupt:
            trainer.save(path)
            raise

    def _trainer(self, teacher: Teacher) -> Trainer:
        options, plan = self._options, self._training
        if options.kind is Kind.LM:
            device, path = torch.device(options.device), self._checkpoint
            if path.exists():
                return LmTrainer.restore(path, options.target.path, plan, device)
            return LmTrainer(pruned(options.target.path, options.layers), options.target.path, plan, device)
        table = teacher.network.get_input_embeddings().weight.detach()

        def embed(ids: Tensor) -> Tensor:
            return F.embedding(ids, table)

        device, path = torch.device(options.device), self._checkpoint
        if path.exists():
            return HeadTrainer.restore(path, embed, plan, device)
        ids = frequent_ids(self._store, options.draft_vocab, table.shape[0])
        config = head_config(teacher.network.config, teacher.layers, len(ids))
        output = teacher.network.get_output_embeddings().weight.detach().cpu()
        norm = getattr(teacher.network.get_decoder(), "norm", None)
        head = initial_head(config, ids, output, None if norm is None else norm.weight.detach().cpu(), options.seed)
        scale = feature_scale(self._store)
        fit_start(head, embed, scale, fitting_rows(self._store, teacher))
        return HeadTrainer(head, embed, scale, plan, device)

    def _trial(self, teacher: Teacher, tokenizer: Any, prompts: Prompts) -> Speed:
        """Answers and trains for some seconds; what it makes is thrown away."""
        asked = [Asked(render(tokenizer, prompt), 1.0) for prompt in prompts.batch(0, _TRIAL_PROMPTS, Library())]
        began = time.monotonic()
        lessons = teacher.answer(
            asked,
            max_tokens=_TRIAL_TOKENS,
            stop_ids=stop_ids_of(teacher.network, tokenizer),
            generator=torch.Generator().manual_seed(self._options.seed),
        )
        generated_per_s = sum(len(one.top_ids) for one in lessons) / (time.monotonic() - began)
        device = torch.device(self._options.device)
        trainer = self._untrained(teacher, device)
        speeds = [trainer.speed(batch) for batch in batches(lessons, self._training.rows, random.Random(0), device)]
        sizes = [one.features.numel() * 2 + one.top_ids.numel() * 6 for one in lessons]
        answered = sum(len(one.top_ids) for one in lessons)
        # The trial's answers are short, and a prompt's features weigh as much as a longer answer's.
        return Speed(generated_per_s, max(speeds), sum(sizes) / answered / 2)

    def _untrained(self, teacher: Teacher, device: torch.device) -> Trainer:
        """As large as what is to be trained."""
        options, plan = self._options, self._training
        if options.kind is Kind.LM:
            return LmTrainer(pruned(options.target.path, options.layers), options.target.path, plan, device)
        table = teacher.network.get_input_embeddings().weight.detach()
        config = head_config(teacher.network.config, teacher.layers, min(options.draft_vocab, table.shape[0]))
        head = initial_head(config, torch.arange(config.draft_vocab), table.cpu(), None, options.seed)
        return HeadTrainer(head, lambda ids: F.embedding(ids, table), torch.ones(head.fc.in_features), plan, device)

    @property
    def _checkpoint(self) -> Path:
        return self._options.work / (_TRAINER if self._options.kind is Kind.EAGLE3 else _LM_TRAINER)

    def _open(self) -> float:
        path = self._options.work / _STATE
        if not path.exists():
            if self._store.shards() and not self._options.resume:
                raise InvalidArgument(
                    "work", f"{self._options.work} holds answers of another run; --resume goes on with it"
                )
            return 0.0
        if not self._options.resume:
            raise InvalidArgument("work", f"{self._options.work} holds a run; --resume goes on with it")
        known = json.loads(path.read_text(encoding="utf-8"))
        for name, value in self._settings.items():
            if known["settings"][name] != value:
                raise InvalidArgument(
                    name, f"is {value!r}, but {self._options.work} was begun with {known['settings'][name]!r}"
                )
        return float(known["generating_s"])

    def _remember(self) -> None:
        state = {"settings": self._settings, "generating_s": self._generating_s}
        (self._options.work / _STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def _facts(self, trainer: Trainer) -> Facts:
        options = self._options
        shards = [self._store.info(path) for path in self._store.shards()]
        kinds: Counter[str] = Counter()
        for shard in shards:
            kinds[shard.kind] += shard.tokens
        return Facts(
            target=options.target.model_id,
            revision=options.target.revision or "unknown",
            licence=options.target.licence,
            prompts=f"the prompts of {options.prompts.name}" if options.prompts else "the built-in prompts",
            seed=options.seed,
            answers=sum(shard.answers for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            kinds=kinds,
            generating_s=self._generating_s,
            training_s=trainer.seconds,
            trained_tokens=trainer.tokens,
            machine=_machine(options.device),
            shape=_shape(trainer),
            curve=trainer.curve,
        )


def _teacher(options: Options) -> Teacher:
    config = json.loads((Path(options.target.path) / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    dtype = torch.bfloat16 if config.get("dtype", config.get("torch_dtype")) != "float32" else torch.float32
    return Teacher.load(options.target.path, feature_layers(text["num_hidden_layers"]), dtype, options.device)


def _shape(trainer: Trainer) -> Shape:
    if isinstance(trainer, HeadTrainer):
        config = trainer.head.config
        return HeadShape(config.parameters, config.draft_vocab, config.feature_layers, FEATURE_WINDOW)
    assert isinstance(trainer, LmTrainer)
    return LmShape(trainer.parameters, trainer.layers)


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} core{'s' if threads > 1 else ''} of a {platform.machine()} CPU"
