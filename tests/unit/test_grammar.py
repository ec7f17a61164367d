"""Structured output: the mask as a function of the text alone, and answers of one form with and without speculation."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.generate_request import query_from_pb
from outrider.engine.grammar import Grammars, Matcher
from outrider.errors import InvalidArgument
from outrider.grammar import MAX_GRAMMAR, Grammar, GrammarKind
from outrider.guidance import problem
from outrider.rpc.stream_codec import params_to_pb
from outrider.sampling import SamplingParams
from outrider.v1 import coordinator_pb2
from tests.unit.pure_pair import PurePair
from tests.unit.test_parameters import COUPLED, GREEDY, OFF, PROMPT, ask, client_of, what_is_said

EOS, VOCAB = 257, 258
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"enum": [1, 23, 456]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["ok", "name", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}}
ASKED: dict[str, dict[str, Any]] = {
    "json_schema": FORMAT,
    "guided_json": {"guided_json": SCHEMA},
    "regex": {"guided_regex": "(ab?|[0-9]{2}){3,9}[xyz]"},
    "choice": {"guided_choice": ["apple", "apricot", 'a "quoted" one', "zwölf\nend"]},
    "structured_outputs": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A law under which every id follows every other one, white space seldom."""
    weights = np.random.default_rng(3).gamma(0.3, size=(VOCAB, VOCAB)) + 1e-4
    weights[:, [9, 10, 13, 32]] *= 1e-3
    path = tmp_path_factory.mktemp("law") / "table.json"
    path.write_text(json.dumps((weights / weights.sum(1, keepdims=True)).tolist()))
    return path


def pair_of(table: Path, draft: str) -> PurePair:
    sign = "&" if "?" in draft else "?"
    return PurePair(f"stub:markov?table={table}&eos={EOS}", f"stub:{draft}{sign}table={table}&eos={EOS}")


def check(name: str, text: str) -> None:
    if name == "regex":
        assert re.fullmatch(ASKED[name]["guided_regex"], text)
    elif name == "choice":
        assert text in ASKED[name]["guided_choice"]
    else:
        value = json.loads(text)
        assert list(value) == ["ok", "name", "sizes"]
        assert isinstance(value["ok"], bool) and len(value["name"]) <= 6
        assert 1 <= len(value["sizes"]) <= 3 and set(value["sizes"]) <= {1, 23, 456}


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("draft", ["perfect", "wrong", "accept?p=0.7"])
async def test_a_form_gives_the_same_answer_with_speculation_on_and_off(
    table: Path, draft: str, mode: dict[str, Any]
) -> None:
    """Guards the mask at every slot, and the end of the answer, against what was drafted and rejected before."""
    pair = pair_of(table, draft)
    async with client_of(pair) as client:
        for name, form in ASKED.items():
            fields = {"prompt": PROMPT, "max_tokens": 400, "logprobs": 1, **mode, **form}
            plain = what_is_said(await ask(client, **fields, **OFF))
            assert what_is_said(await ask(client, **fields)) == plain
            (choice,) = plain[0]
            assert choice["finish_reason"] == "stop"
            check(name, choice["text"])
    assert max(pair.rounds) == 4 if draft == "perfect" else min(pair.rounds) < 4


@pytest.mark.parametrize("draft", ["perfect", "wrong", "accept?p=0.7"])
async def test_the_standard_rule_keeps_to_the_form(table: Path, draft: str) -> None:
    """Guards recovered and bonus tokens above temperature 0."""
    pair = pair_of(table, draft)
    async with client_of(pair) as client:
        for name, form in ASKED.items():
            body = await ask(client, prompt=PROMPT, max_tokens=400, n=2, temperature=1, **form)
            for choice in body["choices"]:
                assert choice["finish_reason"] == "stop"
                check(name, choice["text"])
    assert pair.rounds


async def test_a_matcher_that_is_not_rolled_back_is_seen(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: what a rejected draft led the matcher to stays."""
    pair = pair_of(table, "accept?k=1")
    fields = {"prompt": PROMPT, "max_tokens": 60, **COUPLED, **FORMAT}
    async with client_of(pair) as client:
        plain = what_is_said(await ask(client, **fields, **OFF))
        assert what_is_said(await ask(client, **fields)) == plain
        monkeypatch.setattr(Matcher, "_rewind", lambda self, length: None)
        response = await client.post("/v1/completions", json={"return_token_ids": True, **fields})
    assert response.status_code != 200 or what_is_said(response.json()) != plain


async def test_logprobs_stay_those_of_the_raw_logits(table: Path) -> None:
    """Guards against log-probabilities of masked rows: the only id allowed would have 0."""
    law = np.log(np.array(json.loads(table.read_text())))
    async with client_of(pair_of(table, "accept?p=0.7")) as client:
        body = await ask(client, prompt=PROMPT, max_tokens=100, logprobs=0, **COUPLED, **FORMAT)
    (choice,) = body["choices"]
    ids = [PROMPT.encode()[-1], *choice["token_ids"]]
    expected = [law[before, after] for before, after in pairwise(ids)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}),
        ("guided_json", {"guided_json": {"type": "object", "propertyNames": {"pattern": "a"}}}),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": {"$ref": "http://127.0.0.1:9/schema.json"}}),  # nothing is fetched
        ("guided_json", {"guided_json": {"enum": ["x" * MAX_GRAMMAR]}}),
        ("guided_regex", {"guided_regex": "a("}),
        ("guided_regex", {"guided_regex": "(?=a)b"}),
        ("ignore_eos", {"ignore_eos": True, "response_format": {"type": "json_object"}}),
        ("min_tokens", {"min_tokens": 3, "guided_choice": ["a"]}),
    ],
)
async def test_what_cannot_be_followed_is_refused_at_the_door(field: str, body: dict[str, Any]) -> None:
    """Guards the field's name; an unsupported keyword that was ignored would let wrong answers through."""
    async with client_of(PurePair()) as client:
        response = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_grpc_takes_the_same_grammars() -> None:
    """Guards the other door, a kind from a newer client included: without a form it would be given any text."""
    asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    request = coordinator_pb2.GenerateRequest(text=PROMPT, params=params_to_pb(SamplingParams(grammar=asked)))
    assert query_from_pb(request, None).sampling.grammar == asked
    for kind in (0, 99):
        request.params.grammar.kind = kind  # type: ignore[assignment]
        with pytest.raises(InvalidArgument, match="grammar: unknown kind"):
            query_from_pb(request, None)


async def test_a_text_is_any_text() -> None:
    async with client_of(PurePair()) as client:
        fields = {"prompt": PROMPT, **COUPLED}
        plain = what_is_said(await ask(client, **fields))
        assert what_is_said(await ask(client, **fields, response_format={"type": "text"})) == plain


def ids_of(mask: np.ndarray | None) -> list[int]:
    assert mask is not None and mask.shape == (300,)
    return np.flatnonzero(mask).tolist()


def test_a_mask_depends_on_the_text_before_it_alone() -> None:
    """Guards every order of asking: ahead, back, aside, behind a forbidden token and behind the end."""
    matcher = Grammars(None, VOCAB, (EOS,)).matcher(Grammar(GrammarKind.REGEX, "a(bc|bd|xyz)e*"))

    def after(text: str) -> list[int]:
        return ids_of(matcher.mask(text.encode(), 300))  # type: ignore[arg-type]

    assert after("") == [97]
    assert after("abd") == [101, EOS]
    assert after("axy") == [122]
    assert matcher.mask([97, 98, 98], 300) is None
    assert matcher.mask([97, 98, 100, EOS], 300) is None
    assert matcher.mask([97, 98, 270, 99], 300) is None  # an id that the tokenizer lacks
    assert after("ab") == [99, 100]
    assert after("abceee") == [101, EOS]
    assert after("a") == [98, 120]
    assert after("") == [97]


def test_a_service_says_why_it_cannot_follow(tmp_path: Path) -> None:
    """Guards the folder without a tokenizer, and a draft there: it drafts on, unconstrained."""
    grammar = Grammar(GrammarKind.CHOICE, '["a"]')
    bare = Grammars(tmp_path, VOCAB, (EOS,))
    bare.load()
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        bare.matcher(grammar)
    assert bare.mirror(grammar) is None
    with pytest.raises(InvalidArgument, match="end-of-sequence"):
        Grammars(None, VOCAB, ()).matcher(grammar)
    with pytest.raises(InvalidArgument, match="list of texts"):
        Grammars(None, VOCAB, (EOS,)).matcher(Grammar(GrammarKind.CHOICE, '[""]'))


def words(folder: Path) -> tuple[Grammars, int]:
    """A byte-level tokenizer with a few longer tokens, and its end-of-sequence id."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ("{", '"'), ("o", "k"), ("a", "b")]
    vocabulary = {text: index for index, text in enumerate([*characters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")
    return Grammars(folder, 300, (end,)), end


def test_a_tokenizer_of_a_model_folder(tmp_path: Path) -> None:
    """Guards ids of several characters, special ids and rows beyond the tokenizer; forced text is written as usual."""
    grammars, end = words(tmp_path)
    matcher = grammars.matcher(Grammar(GrammarKind.REGEX, "(tr|u)(ue)?"))
    names = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    assert ids_of(matcher.mask([], 300)) == sorted(names[text] for text in ("t", "tr", "u", "true"))
    assert ids_of(matcher.mask([names["tr"]], 300)) == sorted([names["ue"], names["u"], end])
    assert ids_of(matcher.mask([names["true"]], 300)) == [end]


def test_masks_do_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    """Guards what the library remembers beside the text: each mask is that of a matcher that has seen nothing else."""
    grammars, end = words(tmp_path)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    matcher, rng = grammars.matcher(grammar), np.random.default_rng(5)
    text: list[int] = []
    for _ in range(300):
        mask = matcher.mask(text, 300)
        fresh = grammars.matcher(grammar).mask(text, 300)
        assert (mask is None and fresh is None) or ids_of(mask) == ids_of(fresh)
        if mask is None or ids_of(mask) == [end]:
            text = text[: rng.integers(len(text) + 1)]
        elif rng.random() < 0.1:
            text = [*text[: -rng.integers(1, 5)], int(rng.integers(258))]
        else:
            text = [*text, int(rng.choice(ids_of(mask)))]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.CHOICE, '["\\ud800"]'),
        Grammar(GrammarKind.TOOL_CALLS, '{"functions": {"\\ud800": true}}'),
    ],
)
def test_half_of_a_surrogate_pair_is_the_clients_fault(grammar: Grammar) -> None:
    """Guards the gRPC door, where such a text arrives as JSON writes it, against INTERNAL."""
    assert "half of a surrogate pair" in (problem(grammar) or "")
