"""Loading an MTP head for serving: of a target's checkpoint the MTP layer, the embeddings and the output head alone.

transformers leaves those layers out when it loads the target, and has a module for them (`MtpModel`), which knows how
each architecture's checkpoints name and store them. The target itself is built without memory, as what that module
takes names and shapes from.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from outrider.engine import attention, experts
from outrider.engine.config import EngineConfig
from outrider.engine.embeddings import load_embeddings, load_output
from outrider.engine.feature_store import FeatureStore
from outrider.engine.head_info import DEFAULT_WINDOW, LONGEST_STREAM, HeadLimits, head_info
from outrider.engine.head_model import HeadModel
from outrider.engine.model import first_line, read_config, resolve_device, resolve_dtype, set_threads
from outrider.engine.mtp import MtpHead
from outrider.engine.packing import pack_linears
from outrider.engine.support import architecture_of, check_supported
from outrider.errors import ModelRefused, ModelUnavailable
from outrider.features import FeatureRequest

log = logging.getLogger(__name__)


def load_mtp(config: EngineConfig, *, limits: HeadLimits) -> HeadModel:
    """Loads the first MTP layer of a target; must run in the thread that will call `forward`.

    Args:
        config: of the head; its model is the target's folder.
        limits: of its memory.

    Raises:
        ModelUnavailable: the folder cannot be read.
        ModelRefused: it holds no MTP layer, or one that is not supported.
    """
    started = time.monotonic()
    folder = Path(config.model)
    hf_config = read_config(config)
    _check(hf_config)
    check_supported(hf_config)
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    set_threads(config, dtype)
    attention.register()
    experts.register()
    head = _head(folder, hf_config, device, dtype)
    embeddings = load_embeddings(folder)
    shape = head.shape
    window = limits.window or DEFAULT_WINDOW
    if head.sliding_window is not None:
        window = max(min(window, head.sliding_window - limits.slots), 1)
    text = hf_config.get_text_config()
    parameters = sum(weight.numel() for weight in head.layer.parameters())
    pack_linears(head)
    request = FeatureRequest((text.num_hidden_layers,), window)
    info = head_info(
        config,
        shape,
        architecture=f"{architecture_of(hf_config)}, MTP layer",
        vocab=len(head.target_ids),
        parameters=parameters,
        target_hidden=shape.hidden,
        longest=config.max_model_len or getattr(text, "max_position_embeddings", None) or LONGEST_STREAM,
        device=device,
        dtype=dtype,
    )
    model = HeadModel(
        head,
        embeddings if device.type == "cpu" else embeddings.to(device),
        info,
        FeatureStore(request.row_bytes(shape.hidden), window),
        kind="mtp",
        request=request,
        seats=limits.seats,
        slots=limits.slots,
        device=device,
        dtype=dtype,
    )
    log.info(
        "loaded the MTP layer of %s (%s, %.1f M parameters, %s, window %d) in %.1f s",
        info.model_id,
        architecture_of(hf_config),
        parameters / 1e6,
        info.dtype,
        window,
        time.monotonic() - started,
    )
    return model


def _check(hf_config: PretrainedConfig) -> None:
    """
    Raises:
        ModelRefused: this checkpoint's MTP layers, if it has any, cannot be run.
    """
    architecture, text = architecture_of(hf_config), hf_config.get_text_config()
    count = getattr(text, "num_mtp_layers", None)
    if count is None:
        raise ModelRefused(f"{architecture}: transformers knows no MTP layers of this architecture")
    if not count:
        raise ModelRefused(f"{architecture}: the config names no MTP layers (num_nextn_predict_layers is 0)")
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ModelRefused(f"{architecture}: quantised MTP layers are not supported; take unquantised weights")
    if count > 1:
        log.warning("%s has %d MTP layers; the first one drafts every token", architecture, count)


def _head(folder: Path, hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> MtpHead:
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ModelRefused("MTP layers need transformers 5.24 or newer") from error
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION, trust_remote_code=False
        )
    target.config.name_or_path = str(folder)
    # transformers' own list names the layers of the published sizes; in any other they follow the last one as well.
    depth = hf_config.get_text_config().num_hidden_layers
    named = [rf"^model\.layers\.{depth + index}\." for index in range(hf_config.get_text_config().num_mtp_layers)]
    target._keys_to_ignore_on_load_unexpected = [*named, *_unnumbered(target)]
    try:
        layers = MtpModel.from_pretrained(target, device_map={"": device})
    except (OSError, KeyError) as error:
        raise ModelUnavailable(f"{folder} cannot be read: {first_line(error)}") from error
    except (RuntimeError, StopIteration, ValueError) as error:
        raise ModelRefused(f"{folder} lacks the MTP layers that its config names: {first_line(error)}") from error
    layers.eval()
    layers.set_attn_implementation(attention.IMPLEMENTATION)
    layers.set_experts_implementation(experts.IMPLEMENTATION)
    rotary = type(target.get_decoder().rotary_emb)(config=layers.config)
    head = MtpHead(layers.layers[0].to(device, dtype), rotary.to(device), load_output(folder).to(device, dtype))
    return head.to(device).requires_grad_(requires_grad=False)


def _unnumbered(target: Any) -> list[str]:
    """Patterns of layers that lie under a name of their own, such as `mtp.`."""
    patterns = type(target)._keys_to_ignore_on_load_unexpected or []
    return [pattern for pattern in patterns if "layers" not in pattern]
