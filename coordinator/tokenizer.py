"""The served model's tokenizer, built from the files that the target sends; imports no torch and no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from coordinator.chat_template import ChatTemplate, Message
from coordinator.detokenizer import Detokenizer
from coordinator.token_bytes import TokenBytes, byte_characters
from outrider.errors import InvalidArgument, Mismatch

BYTES = "stub:bytes"
"""File name that stands for the built-in tokenizer: 256 bytes, `<bos>` 256, `<eos>` 257."""
_BYTES_TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if documents %}documents: {{ documents | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer:
    """Text to ids and back, and conversations to ids.

    Attributes:
        size: all ids are below it, added ones included.
        special_ids: ids without text of their own, such as end-of-sequence.
        bytes: what each id writes.
        template: the model's chat template, or None.
    """

    def __init__(
        self,
        backend: Backend,
        bos_id: int | None,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` (`bos_token`, ...) are what chat templates call them."""
        self._specials = dict(special_tokens or {})
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_id = bos_id
        self.template = template
        self.bytes = TokenBytes(backend)
        self.size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        added = backend.get_added_tokens_decoder()
        self._special_by_text = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self._special_by_text.values())

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], chat_template: str | None = None) -> Tokenizer:
        """From a model folder's tokenizer files; `chat_template` replaces the model's own.

        Raises:
            Mismatch: the files hold no tokenizer that the `tokenizers` library can load.
        """
        if BYTES in files:
            return _bytes(chat_template)
        if "tokenizer.json" not in files:
            raise Mismatch("the target sent no tokenizer.json: its model has no fast tokenizer")
        try:
            backend = Backend.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises plain Exception
            raise Mismatch(f"the target's tokenizer.json cannot be loaded: {error}") from None
        config = _read_json(files, "tokenizer_config.json")
        _add_missing_tokens(backend, config)
        specials = _special_tokens({**_read_json(files, "special_tokens_map.json"), **config})
        bos = specials.get("bos_token")
        _apply_bos_eos(backend, config, specials)
        source = chat_template or _template_source(files, config)
        template = ChatTemplate(source, specials) if source else None
        return cls(backend, backend.token_to_id(bos) if bos else None, template, specials)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt's text, with what the model's tokenizer adds; its beginning-of-sequence id at most once.

        Args:
            add_special_tokens: whether the tokenizer may add any.

        Raises:
            UnicodeError: the text holds half of a surrogate pair.
        """
        ids = self._ids(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]:
            del ids[0]  # the text was rendered by a chat template and begins with it already
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        add_special_tokens: bool = False,
        must_read: Sequence[str] = (),
        **options: Any,
    ) -> list[int]:
        """Ids of a conversation, rendered by the chat template (see `ChatTemplate.render`), which adds all specials.

        Args:
            messages: in order.
            template: replaces the model's own.
            add_special_tokens: whether the tokenizer may add what the template left out.
            must_read: variables that the request sets and that would be lost if the template did not look at them.
            options: of `ChatTemplate.render`.

        Raises:
            InvalidArgument: no template, or it rejects the conversation.
            UnicodeError: as in `encode`.
        """
        chosen = self.template if template is None else ChatTemplate(template, self._specials)
        if chosen is None:
            raise InvalidArgument(
                "messages", "the model has no chat template; start the coordinator with --chat-template FILE"
            )
        for name in must_read:
            if not chosen.reads(name):
                raise InvalidArgument(name, "cannot be told to the model: its chat template takes none")
        return self.encode(chosen.render(messages, **options), add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of complete ids."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def special_id(self, text: str) -> int | None:
        """The special id that is written `text`, or None."""
        return self._special_by_text.get(text)

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """Incremental decoding of an answer to this prompt."""

        def decode(ids: list[int]) -> str:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

        skipped = self.special_ids if skip_special_tokens else frozenset()
        return Detokenizer(decode, skipped, prompt_ids, self.bytes.single)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text.encode()  # JSON can carry what is no text; the library would take it for a wrong type
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)


def _bytes(chat_template: str | None) -> Tokenizer:
    alphabet = byte_characters()
    backend = Backend(models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    specials = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return Tokenizer(backend, 256, ChatTemplate(chat_template or _BYTES_TEMPLATE, specials), specials)


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise Mismatch(f"the target's {name} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Older folders list added tokens only beside tokenizer.json."""
    listed: dict[str, Any] = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            names = ("single_word", "lstrip", "rstrip", "normalized", "special")
            backend.add_tokens([AddedToken(entry["content"], **{name: bool(entry.get(name)) for name in names})])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... as texts."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _apply_bos_eos(backend: Backend, config: Mapping[str, Any], specials: Mapping[str, str]) -> None:
    """An explicit `add_bos_token` or `add_eos_token` replaces the post-processor, as in transformers 5."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = specials.get("bos_token") if config.get("add_bos_token") else None
    eos = specials.get("eos_token") if config.get("add_eos_token") else None
    single = " ".join(part for part in (bos, "$A", eos) if part)
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in {bos, eos} if token]
    )


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """The default template: a file of its own, else the configuration's (a text, or a list of named texts)."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
