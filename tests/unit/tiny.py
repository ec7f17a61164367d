"""Tiny random models as real Hugging Face folders, for tests that need weights but no particular ones."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = 0


def tiny_llama(
    folder: Path,
    vocab: int = 128,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 2048,
    scale: float = 8.0,
    tokenizer: bool = False,
) -> Path:
    """Saves a random llama and returns its folder.

    Args:
        folder: Where to save; created if missing.
        vocab: Rows of embedding and head.
        dtype: Of the saved weights.
        seed: Equal seeds give equal weights.
        layers, hidden, heads, kv_heads, max_positions: Its shape.
        scale: Factor on the usual initial standard deviation, large enough that logits spread and text varies.
        tokenizer: Whether to add a byte-level tokenizer (needs vocab >= 257; id 0 is the end of text).
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        initializer_range=0.02 * scale,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = LlamaForCausalLM(config).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer(folder, vocab)
    return folder


def byte_tokenizer(folder: Path, vocab: int) -> None:
    """Saves a tokenizer with one id per byte, 1 .. 256, id 0 as the end of text and a plain chat template."""
    if vocab < 257:
        raise ValueError(f"a byte-level tokenizer needs a vocabulary of at least 257, not {vocab}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {"<|end|>": EOS, **{symbol: index + 1 for index, symbol in enumerate(alphabet)}}
    raw = Tokenizer(models.BPE(vocab=ids, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
