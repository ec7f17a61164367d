"""Vocabularies are compared by what every id means, not by size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import Mismatch, ModelUnavailable
from outrider.vocabulary import Comparison, Difference, Kind, Vocabulary, compare


def vocabulary(size: int = 90, rows: int = 0, **changed: str) -> Vocabulary:
    """`size` tokens t0, t1, ...; `_7="x"` gives id 7 another string. The last three ids are special."""
    tokens = [changed.get(f"_{i}", f"t{i}") for i in range(size)]
    return Vocabulary(tuple(tokens), frozenset(range(size - 3, size)), rows)


def tokenizer_json(vocab: object, added: list[tuple[int, str]]) -> bytes:
    tokens = [{"id": i, "content": content, "special": True} for i, content in added]
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}).encode()


def test_equal_vocabularies_are_the_same_without_a_word() -> None:
    """Guards against noise at every ordinary start."""
    assert compare(vocabulary(), vocabulary()) == Comparison(Kind.SAME, (), None, 1.0, "")


@pytest.mark.parametrize(
    ("target_rows", "draft_rows", "excluded"), [(128, 100, range(90, 100)), (100, 128, range(90, 128))]
)
def test_padding_rows_start_and_are_never_drafted(target_rows: int, draft_rows: int, excluded: range) -> None:
    """Guards against a refused start, or drafted padding, where a family pads its rows differently."""
    found = compare(vocabulary(rows=target_rows), vocabulary(rows=draft_rows))
    assert found.kind is Kind.COMPATIBLE
    assert found.excluded_ids == tuple(excluded)
    assert found.share_agreeing == 1.0
    assert f"target {target_rows} for 90" in found.message and "\n" not in found.message
    found.require()


def test_shared_padding_is_never_drafted_either() -> None:
    """Guards against a draft that proposes ids without any token string when both sides have the same rows."""
    found = compare(vocabulary(rows=96), vocabulary(rows=96))
    assert (found.kind, found.excluded_ids) == (Kind.SAME, tuple(range(90, 96)))


def test_two_swapped_ids_stop_and_the_first_is_named() -> None:
    """Guards against unlike tokenizers of one size being paired because only sizes were compared."""
    found = compare(vocabulary(), vocabulary(_17="t40", _40="t17"))
    assert found.kind is Kind.DIFFERENT
    assert found.first_difference == Difference(17, "t17", "t40")
    assert found.share_agreeing == pytest.approx(88 / 90)
    with pytest.raises(Mismatch, match=r"97\.8%.*id 17 \(target 't17', draft 't40'\).*--allow-vocab-mismatch"):
        found.require()


def test_an_allowed_mismatch_confines_the_draft_to_the_agreeing_ids() -> None:
    """Guards against q holding an id that means something else once the user overrides the refusal."""
    found = compare(vocabulary(), vocabulary(_17="t40", _40="t17"))
    found.require(allow_mismatch=True)
    assert found.excluded_ids == (17, 40)


def test_a_changed_special_token_starts_excluded_and_listed() -> None:
    """Guards against a silent start with a special id that means another thing on the draft's side."""
    found = compare(vocabulary(), vocabulary(_88="<other>"))
    assert found.kind is Kind.COMPATIBLE
    assert found.excluded_ids == (88,)
    assert found.first_difference == Difference(88, "t88", "<other>")
    assert "differ: 88" in found.message and "\n" not in found.message


def test_an_ordinary_difference_is_named_before_an_earlier_special_one() -> None:
    """Guards against a refusal whose example is a difference that alone would have been accepted."""
    target = Vocabulary(("<a>", "x", "y"), frozenset({0}))
    draft = Vocabulary(("<b>", "x", "z"), frozenset({0}))
    assert compare(target, draft).first_difference == Difference(2, "y", "z")


@pytest.mark.parametrize(("target_size", "draft_size", "excluded"), [(90, 80, ()), (80, 90, range(80, 90))])
def test_ids_that_one_side_lacks_start_and_are_never_drafted(
    target_size: int, draft_size: int, excluded: range
) -> None:
    """Guards against a draft proposing ids that the target does not have."""
    target = Vocabulary(tuple(f"t{i}" for i in range(target_size)))
    draft = Vocabulary(tuple(f"t{i}" for i in range(draft_size)))
    found = compare(target, draft)
    assert (found.kind, found.excluded_ids) == (Kind.COMPATIBLE, tuple(excluded))
    assert "80-89" in found.message


def test_a_draft_that_agrees_nowhere_is_different_even_if_only_specials_differ() -> None:
    """Guards against pairing models that could never accept a token."""
    target, draft = Vocabulary(("<a>",), frozenset({0})), Vocabulary(("<b>",), frozenset({0}))
    assert compare(target, draft).kind is Kind.DIFFERENT


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 1}, [["a", -1.0], ["b", -2.0]]], ids=["bpe", "unigram"])
def test_tokenizer_files_are_read_with_their_added_tokens(vocab: object) -> None:
    """Guards against comparing the base vocabulary only, where added tokens sit beyond it."""
    read = Vocabulary.from_bytes(tokenizer_json(vocab, [(3, "<eos>")]))
    assert read == Vocabulary(("a", "b", None, "<eos>"), frozenset({3}), 4)


def test_the_hash_ignores_layout_and_padding_but_not_meaning() -> None:
    """Guards against a hash of the file's bytes, which changes with every version of the library that writes it."""
    one = Vocabulary.from_bytes(tokenizer_json({"a": 0, "b": 1}, []))
    other = Vocabulary.from_bytes(tokenizer_json({"b": 1, "a": 0}, [])).with_rows(64)
    assert one.hash == other.hash
    assert one.hash != Vocabulary.from_bytes(tokenizer_json({"a": 1, "b": 0}, [])).hash


def test_a_folder_gives_tokens_and_rows(tmp_path: Path) -> None:
    """Guards against taking the tokenizer's size for the model's rows."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json({"a": 0}, []))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    assert Vocabulary.from_folder(tmp_path).rows == 64


def test_a_folder_without_a_tokenizer_file_names_the_remedy(tmp_path: Path) -> None:
    """Guards against a bare FileNotFoundError for models that ship a sentencepiece file only."""
    with pytest.raises(ModelUnavailable, match="save_pretrained"):
        Vocabulary.from_folder(tmp_path)


def test_a_broken_tokenizer_file_is_a_mismatch_in_one_line() -> None:
    """Guards against a traceback when a service sends something else."""
    with pytest.raises(Mismatch, match=r"not a tokenizer\.json"):
        Vocabulary.from_bytes(b"{}")


def test_the_byte_stub_has_two_special_ids_behind_its_bytes() -> None:
    """Guards the layout that stub models and their tests rely on."""
    stub = Vocabulary.stub_bytes()
    assert (len(stub.tokens), stub.token(65), stub.token(257), stub.added) == (258, "<0x41>", "</s>", {256, 257})
