"""Text of an answer: incremental decoding, stop strings, chat templates, and the ids of a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from coordinator.chat_template import ChatTemplate
from coordinator.text import AnswerText
from coordinator.tokenizer import Tokenizer
from outrider.errors import InvalidArgument, Mismatch

BYTES = Tokenizer.from_files({"stub:bytes": b""})
EOS = 257


def answer_text(*, stop: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False) -> AnswerText:
    return AnswerText(
        BYTES.detokenizer([]),
        stop=stop,
        stop_ids=frozenset({EOS}),
        min_tokens=min_tokens,
        include_stop=include_stop,
    )


def stream(tokens: Sequence[int], cuts: Sequence[int], text: AnswerText) -> tuple[list[str], list[int]]:
    """Feed tokens in rounds of the given sizes; the pieces, and the tokens that the answer kept."""
    pieces, kept = [], []
    position = 0
    for size in [*cuts, len(tokens)]:
        chunk = tokens[position : position + size]
        position += len(chunk)
        if not chunk:
            continue
        cut = text.cut(chunk)
        chunk = chunk if cut is None else chunk[: cut + 1]
        kept += chunk
        last = cut is not None or position == len(tokens)
        pieces.append(text.take(chunk, last=last).text)
        if last:
            break
    return pieces, kept


@given(st.text(max_size=40), st.lists(st.integers(1, 7), max_size=40))
def test_streamed_text_is_the_text_whatever_the_rounds(text: str, cuts: list[int]) -> None:
    """Guards against text sliced twice, holes, and characters torn between rounds."""
    pieces, _ = stream(text.encode(), cuts, answer_text())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@given(st.binary(max_size=60), st.lists(st.integers(1, 7), max_size=60))
def test_bytes_that_are_no_text_come_out_as_in_one_decoding(data: bytes, cuts: list[int]) -> None:
    """Guards against replacement characters counted differently in streams than in whole answers."""
    pieces, _ = stream(data, cuts, answer_text())
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_a_character_over_four_tokens_appears_once_and_whole() -> None:
    """Guards against a replacement character in the middle of a stream."""
    detokenizer = BYTES.detokenizer([])
    assert [detokenizer.push(byte) for byte in "é😀!".encode()] == ["", "é", "", "", "", "😀", "!"]


def test_endless_invalid_bytes_cost_the_same_per_token() -> None:
    """Guards against a window that grows with the answer, which would make its cost quadratic."""
    longest = 0
    backend = BYTES.detokenizer([])
    decode = backend._decode

    def counted(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    backend._decode = counted
    text = "".join(backend.push(0xFF) for _ in range(500)) + backend.flush()
    assert text == "\ufffd" * 500
    assert longest <= 33


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    """Guards against sentencepiece decoders, which strip the space of the first token that they are shown."""
    vocabulary = {"▁Hello": 0, "▁world": 1}
    backend = Backend(models.WordLevel(vocabulary, unk_token="▁Hello"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, None, None)
    assert tokenizer.detokenizer([0]).push(1) == " world"
    assert tokenizer.detokenizer([]).push(1) == "world"


def sentencepiece_bytes() -> Tokenizer:
    """Words with U+2581 for a space, single letters, and every byte, under the decoder that Llama's tokenizer has."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁a", "▁", "b", "é", "STOP", "OP"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, None, None)


SENTENCEPIECE = sentencepiece_bytes()
PIECES = [[257], [258], [259], [260], [261], [262], [263], *([1 + byte for byte in text.encode()] for text in "é€😀x")]


PROMPTS = st.sampled_from(
    [[257, 260], [1 + byte for byte in "é".encode()], [258, *[1 + byte for byte in "😀".encode()]]]
)


def said(prompt: list[int], tokens: list[int]) -> str:
    """What the tokens add to the prompt's text."""
    return SENTENCEPIECE.decode([*prompt, *tokens]).removeprefix(SENTENCEPIECE.decode(prompt))


@given(PROMPTS, st.lists(st.sampled_from(PIECES), max_size=20), st.lists(st.integers(1, 5), max_size=30))
def test_bytes_beside_words_stream_as_they_decode(prompt: list[int], pieces: list[list[int]], cuts: list[int]) -> None:
    """Guards characters that are spelled in bytes behind others and between words, and the space of the first word."""
    tokens = [token for piece in pieces for token in piece]
    text = AnswerText(SENTENCEPIECE.detokenizer(prompt))
    streamed, _ = stream(tokens, cuts, text)
    assert "".join(streamed) == said(prompt, tokens)
    assert not any("\ufffd" in piece for piece in streamed)
    assert b"".join(SENTENCEPIECE.bytes[token] for token in tokens).decode() == "".join(streamed)


@given(
    PROMPTS,
    st.lists(st.sampled_from(PIECES), max_size=20),
    st.lists(st.sampled_from(["STOP", "OP", " a", "é€", "b", "STOPSTOP"]), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_stop_strings_are_found_in_bytes_and_words_alike(
    prompt: list[int], pieces: list[list[int]], stop: list[str], cuts: list[int]
) -> None:
    """Guards stop strings over the edges of tokens of several characters: one token may complete two of them."""
    tokens = [token for piece in pieces for token in piece]
    whole = said(prompt, tokens)
    found = sorted((whole.find(one) + len(one), whole.find(one)) for one in stop if one in whole)
    answer = AnswerText(SENTENCEPIECE.detokenizer(prompt), stop=stop)
    streamed, kept = stream(tokens, cuts, answer)
    assert "".join(streamed) == (whole[: found[0][1]] if found else whole)
    assert (answer.stopped_by is None) is not bool(found)
    if found:  # the last token kept is the one that completes the match
        assert len(said(prompt, kept)) >= found[0][0]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    """Guards against `<eos>` in answers, and against `skip_special_tokens: false` having no effect."""
    assert BYTES.detokenizer([]).push(EOS) == ""
    assert BYTES.detokenizer([], skip_special_tokens=False).push(EOS) == "<eos>"


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 7), max_size=24),
)
def test_a_stop_string_ends_the_answer_where_it_is_first_complete(text: str, stop: list[str], cuts: list[int]) -> None:
    """Guards against stop strings missed at token edges, leaked in part, or found later than another one."""
    ends = [text.find(string) + len(string) for string in stop if string in text]
    kept = min(ends, default=len(text))
    completed = [string for string in stop if text[:kept].endswith(string)] if ends else []
    shown = text[: kept - max(map(len, completed))] if completed else text
    answer = answer_text(stop=stop)
    pieces, tokens = stream(text.encode(), cuts, answer)
    assert "".join(pieces) == shown
    assert bytes(tokens).decode() == text[:kept]
    assert answer.stopped_by == (max(completed, key=len) if completed else None)


def test_what_may_begin_a_stop_string_is_held_back_and_then_given_out() -> None:
    """Guards against a leaked beginning, and against text lost when the match does not come about."""
    answer = answer_text(stop=["STOP"])
    assert answer.take(b"aST", last=False).text == "a"
    assert answer.take(b"Ox", last=False).text == "STOx"
    assert answer.take(b"ST", last=True).text == "ST"


def test_a_stop_string_early_in_a_round_is_found() -> None:
    """Guards against a window that looks only at the end of a block of accepted tokens."""
    answer = answer_text(stop=["b"])
    assert answer.cut(b"abcdef") == 1
    assert answer.take(b"ab", last=True) == ("a", (1, 1), (0, 1))


def test_the_stop_string_is_shown_where_it_is_wanted() -> None:
    """Guards `include_stop_str_in_output`."""
    pieces, _ = stream(b"xaby", [1, 1, 1], answer_text(stop=["ab"], include_stop=True))
    assert "".join(pieces) == "xab"


def test_stop_strings_count_only_behind_min_tokens() -> None:
    """Guards against an answer shorter than `min_tokens`."""
    pieces, tokens = stream(b"abababab", [8], answer_text(stop=["ab"], min_tokens=3))
    assert "".join(pieces) == "abab"
    assert len(tokens) == 6


def test_a_stop_id_has_no_text() -> None:
    """Guards against a stop id's text at the end of the answer."""
    answer = AnswerText(BYTES.detokenizer([]), stop_ids=frozenset(b"c"))
    assert answer.take(b"abc", last=True) == ("ab", (1, 2, 2), (0, 1, 2))


def test_text_ends_say_which_text_each_token_contributed() -> None:
    """Guards the colouring of drafted tokens against characters that complete later."""
    answer = answer_text()
    assert answer.take("aé".encode(), last=False) == ("aé", (1, 1, 2), (0, 1, 1))


def test_a_token_begins_where_its_text_does_though_it_is_held_back() -> None:
    """Guards `text_offset` against the rounds in which text happens to become certain."""
    answer = answer_text(stop=["abx"])
    assert answer.take(b"ab", last=False) == ("", (0, 0), (0, 1))
    assert answer.take(b"c", last=False) == ("abc", (3,), (2,))


def test_the_beginning_of_sequence_stands_exactly_once() -> None:
    """Guards against a second BOS where the template or the caller wrote one already."""
    assert BYTES.encode("x") == [256, ord("x")]
    assert BYTES.encode("<bos>x") == [256, ord("x")]
    chat = BYTES.encode_chat([{"role": "user", "content": "hi"}])
    assert chat.count(256) == 1
    assert BYTES.decode(chat) == "user: hi\nassistant: "


def test_add_bos_token_of_the_configuration_is_obeyed() -> None:
    """Guards against prompts without the BOS that the model was trained with."""
    backend = Backend(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    files = {"tokenizer.json": backend.to_str().encode()}
    plain = {**files, "tokenizer_config.json": json.dumps({"bos_token": "<s>"}).encode()}
    adding = {**files, "tokenizer_config.json": json.dumps({"bos_token": "<s>", "add_bos_token": True}).encode()}
    assert Tokenizer.from_files(plain).encode("a") == [1]
    assert Tokenizer.from_files(adding).encode("a") == [0, 1]


def test_files_without_a_fast_tokenizer_are_refused() -> None:
    """Guards against a coordinator that starts and fails at the first prompt."""
    with pytest.raises(Mismatch, match=r"tokenizer\.json"):
        Tokenizer.from_files({"tokenizer_config.json": b"{}"})


def test_a_model_without_a_chat_template_says_so() -> None:
    """Guards against a made-up format for chats."""
    with pytest.raises(InvalidArgument, match="chat template"):
        Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="a")), None, None).encode_chat([{"role": "user"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ raise_exception('no system role') }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_template_that_fails_is_the_request_s_problem(source: str) -> None:
    """Guards against a template from a model repository reaching Python's internals, or ending in a 500."""
    with pytest.raises(InvalidArgument) as error:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert error.value.field == "messages"


def test_a_template_renders_as_in_transformers() -> None:
    """Guards block trimming, loop controls, `tojson` without HTML escapes, and generation blocks."""
    source = (
        "{%- for message in messages %}\n  {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ message.role }}={{ message.content | tojson }};\n{%- endfor %}\n"
        "{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "skip", "content": ""}]
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(messages) == 'user="<é>";</s>'


def test_the_final_message_can_be_continued() -> None:
    """Guards against an end-of-turn mark behind the message that shall go on."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert BYTES.decode(BYTES.encode_chat(messages, **options)) == "user: hi\nassistant: Well,"


def test_tokenising_needs_no_torch() -> None:
    """Guards the coordinator's memory: torch and transformers cost hundreds of megabytes."""
    code = "import sys, coordinator.app, coordinator.servicer; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
