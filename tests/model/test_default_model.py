"""The default model as it lies in the cache, wherever it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.vocabulary import Kind, Vocabulary, compare

pytestmark = pytest.mark.model


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    [
        "Hello world! It's 12345.",
        "  def f(x):\n    return x  12\n",
        "héllo 你好 🙂",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_text_survives_the_tokenizer(default_model_dir: Path, text: str) -> None:
    """Guards against a conversion that loses bytes, spaces or special tokens."""
    tokenizer = tokenizer_of(default_model_dir)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_split_before_spaces_are_merged(default_model_dir: Path) -> None:
    """Guards against the plain byte-level splitting that a conversion from GGUF leaves behind."""
    assert tokenizer_of(default_model_dir).encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]


def test_the_special_ids_are_those_of_the_chat_format(default_model_dir: Path) -> None:
    """Guards against a model that never stops."""
    tokenizer = tokenizer_of(default_model_dir)
    generation = json.loads((default_model_dir / "generation_config.json").read_text())
    assert tokenizer.encode("<|im_start|><|im_end|>").ids == [1, 2]
    assert generation["eos_token_id"] == 2


def test_the_chat_template_is_the_instruct_models(default_model_dir: Path) -> None:
    """Guards against a chat without its system turn or without the assistant's opening."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_weights_are_bf16(default_model_dir: Path) -> None:
    """Guards against a conversion that doubles the size on disk and in memory."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(default_model_dir / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_the_model_as_its_own_draft_has_one_vocabulary(default_model_dir: Path) -> None:
    """Guards against ids excluded from the draft in the pair that must accept everything."""
    vocabulary = Vocabulary.from_folder(default_model_dir)
    found = compare(vocabulary, vocabulary)
    assert (found.kind, found.excluded_ids, vocabulary.rows) == (Kind.SAME, (), 49_152)
