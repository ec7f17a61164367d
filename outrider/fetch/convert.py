"""Turn a GGUF file into a folder of bf16 safetensors with its tokenizer.

    python -m outrider.fetch.convert GGUF FOLDER

Run as a process of its own: it needs torch, which the coordinator and the command line do without, and its memory goes
back when it ends. Progress goes to stdout as lines `done total`, and one at least every two seconds.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STEPS = 4
_BEAT_S = 2.0


class _Pulse:
    """Repeats the last progress line while a step takes long."""

    def __init__(self) -> None:
        self._done = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def step(self) -> None:
        self._done += 1
        self._say()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            self._say()

    def _say(self) -> None:
        sys.stdout.write(f"{self._done} {STEPS}\n")
        sys.stdout.flush()


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` as `transformers` saves a bf16 model.

    The weights move into a freshly configured model, so nothing of the file's quantisation stays in the saved
    configuration and the folder loads like any other.
    """
    pulse = _Pulse()
    pre_tokenizer = gguf_pre_tokenizer(gguf)  # first, so that a broken file fails before the slow imports
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    torch.set_grad_enabled(False)
    pulse.step()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    restore_pre_tokenizer(tokenizer.backend_tokenizer, pre_tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    pulse.step()
    fields = loaded.config.to_dict()
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype"):
        fields.pop(leftover, None)
    fields["rms_norm_eps"] = round(fields["rms_norm_eps"], 9)  # GGUF stores it in float32
    config = type(loaded.config).from_dict(fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    pulse.step()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pulse.step()
    pulse.stop()


def gguf_pre_tokenizer(gguf: Path) -> str:
    """The name that a GGUF file gives to its way of splitting text before the merges (`tokenizer.ggml.pre`)."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def restore_pre_tokenizer(tokenizer: Tokenizer, name: str) -> None:
    """Give `tokenizer` back the pre-tokenizer that the conversion from GGUF leaves out.

    GGUF stores only its name, and `transformers` puts plain byte-level splitting in its place: two spaces before a
    number would then become one token where the original makes two.

    Raises:
        ValueError: for a name that is not known here.
    """
    from tokenizers import pre_tokenizers

    if name != "smollm":
        raise ValueError(f"pre-tokenizer {name!r} is not known")
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
