"""Prompts to train on: the built-in set, or a file of one's own.

The built-in set covers multi-turn chat, translation, summaries, questions, word problems and questions over passages.
Every other batch is imagined: the target, given the template up to where a user's turn begins, writes that turn itself
(Xu et al. 2406.08464). Such prompts are as varied as what the target was tuned on, which no set of frames is: a draft
trained on frames alone is accepted far more often on other prompts of the same frames than on those of a benchmark.

Prompts about texts need texts: the target's longer answers serve as those, and its earlier chat answers are continued.
Prompt i of batch b depends on the seed, b, i and the earlier answers only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import InvalidArgument
from outrider.training import material as m

Message = dict[str, str]

# Batches by kind: each batch has one, so that its prompts and answers are of similar length.
IMAGINED = "imagined"
CYCLE = tuple(
    kind
    for framed in (
        "writing",
        "chat",
        "maths",
        "translation",
        "questions",
        "summary",
        "passages",
        "follow_up",
        "maths",
        "translation",
        "chat",
        "summary",
        "passages",
        "questions",
    )
    for kind in (framed, IMAGINED)
)
_MOST_TEXTS = 4000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends with a user's turn, and what kind it is."""

    messages: tuple[Message, ...]
    kind: str


@dataclass(slots=True)
class Library:
    """Earlier answers that later prompts build on, and the users' turns that the target imagined for the next batch."""

    texts: list[str] = field(default_factory=list)
    chats: list[tuple[Message, ...]] = field(default_factory=list)
    imagined: list[str] = field(default_factory=list)

    def add(self, prompt: Prompt, answer: str) -> None:
        """Keeps an answer if a later prompt can use it."""
        if prompt.kind in ("writing", IMAGINED) and len(answer) > 300 and len(self.texts) < _MOST_TEXTS:
            self.texts.append(answer.strip())
        elif prompt.kind in ("chat", "maths", IMAGINED) and len(prompt.messages) == 1 and len(self.chats) < _MOST_TEXTS:
            self.chats.append((*prompt.messages, {"role": "assistant", "content": answer}))


class BuiltinPrompts:
    """The set written for this project."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._makers: dict[str, Callable[[random.Random, Library], tuple[Message, ...]]] = {
            "writing": lambda r, _: _user(_filled(r, r.choice(m.WRITING))),
            "chat": lambda r, _: _user(_filled(r, r.choice(m.CHAT))),
            "maths": lambda r, _: _user(_maths(r)),
            "translation": lambda r, _: _user(f"{r.choice(_TRANSLATE)} {_german(r)}"),
            "questions": lambda r, _: _user(_question(r)),
            "summary": lambda r, library: _user(_summary(r, library)),
            "passages": lambda r, library: _user(_passages(r, library)),
            "follow_up": _follow_up,
        }

    def kind(self, number: int) -> str:
        """What a batch asks."""
        return CYCLE[number % len(CYCLE)]

    def batch(self, number: int, size: int, library: Library) -> list[Prompt]:
        """The prompts of one batch; the first batches, without texts to build on, are writing and chat."""
        kind = self.kind(number)
        if kind == IMAGINED and library.imagined:
            return [Prompt(_user(text), IMAGINED) for text in library.imagined[:size]]
        if kind == IMAGINED:
            kind = "chat"
        if kind in ("summary", "passages") and not library.texts:
            kind = "writing"
        if kind == "follow_up" and not library.chats:
            kind = "chat"
        drawn = random.Random(f"{self._seed}/{number}")
        return [Prompt(self._makers[kind](drawn, library), kind) for _ in range(size)]


class FilePrompts:
    """Prompts from a file: a JSON string, or an object with `messages` or `prompt`, on each line."""

    def __init__(self, path: Path, seed: int) -> None:
        """Reads the file.

        Raises:
            InvalidArgument: it holds a line of another form, or none.
        """
        self._prompts: list[Prompt] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                self._prompts.append(Prompt(_messages(line, number), "file"))
        if not self._prompts:
            raise InvalidArgument("prompts", f"{path} holds no prompts")
        random.Random(seed).shuffle(self._prompts)

    def kind(self, number: int) -> str:
        """What a batch asks: what the file does."""
        return "file"

    def batch(self, number: int, size: int, library: Library) -> list[Prompt]:
        """The next prompts; after the last, the first again (other temperatures and draws make other answers)."""
        start = number * size
        return [self._prompts[(start + i) % len(self._prompts)] for i in range(size)]


Prompts = BuiltinPrompts | FilePrompts

_TRANSLATE = (
    "Translate German to English:",
    "Translate German to English:",
    "Translate German to English:",
    "Translate this sentence into English:",
    "Please translate from German into English:",
)
_SUMMARISE = (
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize the following text: {text}",
    "{text}\n\nGive a summary of this text in a few sentences.",
)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _messages(line: str, number: int) -> tuple[Message, ...]:
    try:
        entry = json.loads(line)
        if isinstance(entry, str):
            return _user(entry)
        if "messages" in entry:
            return tuple({"role": str(one["role"]), "content": str(one["content"])} for one in entry["messages"])
        return _user(str(entry["prompt"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InvalidArgument(
            "prompts", f"line {number} is neither a JSON string nor an object with `messages` or `prompt` ({error})"
        ) from None


def _filled(r: random.Random, frame: str) -> str:
    topic, other = r.sample(m.TOPICS, 2)
    place, place2 = r.sample(m.PLACES, 2)
    thing, thing2 = r.sample(m.THINGS, 2)
    name, name2, name3 = r.sample(m.NAMES, 3)
    style = r.choice(m.STYLES) if r.random() < 0.5 else ""
    text = frame.format(
        topic=topic,
        other=other,
        place=place,
        place2=place2,
        thing=thing,
        thing2=thing2,
        name=name,
        name2=name2,
        name3=name3,
        person=r.choice(m.PEOPLE),
        style=f" {style}" if style else "",
        task=r.choice(m.TASKS),
        country=r.choice(m.COUNTRIES),
    )
    return text.replace("  ", " ").replace(" .", ".")


def _question(r: random.Random) -> str:
    text = _filled(r, r.choice(m.QUESTIONS))
    return text[0].upper() + text[1:] + "?" if r.random() < 0.7 else text


def _maths(r: random.Random) -> str:
    a, b, c = r.sample(m.NAMES[:30], 3)
    things, things2 = r.sample(m.GOODS, 2)
    x, y, z, w = (r.randint(2, 9) if r.random() < 0.6 else r.randint(4, 30) for _ in range(4))
    frame = r.choice(m.MATH)
    if "{x}0%" in frame:
        x = r.randint(1, 8)
    job = r.choice(("gardener", "waiter", "tutor", "painter", "plumber"))
    return frame.format(
        a=a,
        b=b,
        c=c,
        things=things,
        things2=things2,
        x=x,
        y=y,
        z=z,
        w=w,
        big=r.choice((60, 90, 120, 144, 200, 240, 360, 500)) + r.randint(0, 20),
        job=job,
    )


def _german(r: random.Random) -> str:
    sentences = [_german_sentence(r) for _ in range(1 if r.random() < 0.75 else 2)]
    return " ".join(sentences)


def _german_sentence(r: random.Random) -> str:
    subject = r.choice(m.GERMAN_SUBJECTS)
    thing, participle, infinitive = r.choice(m.GERMAN_OBJECTS).split("|")
    time, time2 = r.sample(m.GERMAN_TIMES, 2)
    reason, reason2 = r.sample(m.GERMAN_REASONS, 2)
    text = r.choice(m.GERMAN_FRAMES).format(
        s=subject,
        s1=subject[0].lower() + subject[1:],
        o=thing,
        v=participle,
        i=infinitive,
        t=time,
        t1=time[0].upper() + time[1:],
        t2=time2,
        r=reason,
        r2=reason2,
        n=r.choice(m.NAMES),
        p=r.choice(m.PLACES),
    )
    return text.replace("{place}", r.choice(m.PLACES)).replace("einstellen wird", "einstellt")


# Lengths of passages in characters. The draft sees the last positions of a prompt only, so long ones teach it nothing
# that shorter ones do not, and cost the target far more.
_SUMMARISED = (500, 1600)
_PASSAGE = (250, 700)


def _summary(r: random.Random, library: Library) -> str:
    return r.choice(_SUMMARISE).format(text=_passage(r, library, _SUMMARISED))


def _passages(r: random.Random, library: Library) -> str:
    texts = [_passage(r, library, _PASSAGE) for _ in range(r.choice((1, 2, 2, 3)))]
    question = _filled(r, r.choice(m.READING_QUESTIONS if r.random() < 0.6 else m.QUESTIONS))
    question = question if question.endswith("?") else question[0].upper() + question[1:] + "?"
    return "\n".join(texts) + "\n" + question


def _passage(r: random.Random, library: Library, characters: tuple[int, int]) -> str:
    """The beginning of one of the texts, up to the end of a word."""
    text = " ".join(r.choice(library.texts).split())[: r.randint(*characters)]
    return text.rpartition(" ")[0]


def _follow_up(r: random.Random, library: Library) -> tuple[Message, ...]:
    return (*r.choice(library.chats), *_user(_filled(r, r.choice(m.FOLLOW_UPS))))
