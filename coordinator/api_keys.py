"""API keys: who may come in, and under which name. Only their SHA-256 is kept."""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from outrider.errors import InvalidArgument, Unauthenticated

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
_NAME_OF_VARIABLE = "default"
_LOOK_S = 1.0
"""A changed file is noticed by the first request so long after the last look."""


class ApiKey(NamedTuple):
    """One key.

    Attributes:
        name: of the client. Keys of one name are one client: a new key can be given out before the old one ends.
        digest: SHA-256 of the key.
    """

    name: str
    digest: bytes


class Caller(NamedTuple):
    """Who a request is from.

    Attributes:
        name: of the key, which takes turns with the others; empty where no keys are asked for.
        tenant: requests share cached prefixes only within one.
    """

    name: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """The keys that the operator gave out; without any, the doors are open.

    Attributes:
        file: where those of a file came from, or None.
        of_file: what it held.
        fixed: keys that do not change while the coordinator runs.
    """

    file: str | None = None
    of_file: tuple[ApiKey, ...] = ()
    fixed: tuple[ApiKey, ...] = ()

    @property
    def clients(self) -> int:
        """Names that take turns; 1 where no keys are asked for."""
        return len({key.name for key in self.of_file + self.fixed}) or 1

    @classmethod
    def of(cls, file: str | None, variable: str | None) -> ApiKeys:
        """
        Args:
            file: a line for each key, `NAME KEY` or `NAME sha256:HEX`; one that begins with `#` is a comment.
            variable: one more key, or None.

        Raises:
            InvalidArgument: names the line, and never what is on it.
        """
        if variable is not None and not _KEY.fullmatch(variable):
            raise InvalidArgument("api_key", "must be at most 512 visible ASCII characters without a space")
        fixed = () if variable is None else (ApiKey(_NAME_OF_VARIABLE, _digest(variable)),)
        return cls(file=file, of_file=() if file is None else _read(file), fixed=fixed)


class Keyring:
    """The keys as they are now: the file is read again when it has changed."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        self._entries = keys.of_file + keys.fixed
        # On another node of a cluster there may be no such file: the keys came along from where it was read.
        self._stamp = _stamp(keys.file)
        self._looked_s = time.monotonic()

    def caller(self, authorization: str) -> Caller:
        """Who comes with this `Authorization` header (empty without one).

        Raises:
            Unauthenticated: keys are asked for, and this is none of them.
        """
        if not self._entries:
            return Caller("", authorization)
        self._look()
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        digest, found = _digest(key.strip(" ")), None
        for entry in self._entries:  # all of them, so that the time does not tell which one came close
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        if found is None:
            raise Unauthenticated("the API key is not one of this server's")
        return Caller(found.name, found.name)

    def _look(self) -> None:
        """A file that cannot be read, or holds no keys, changes nothing: it must not open the doors, nor lock them."""
        now_s = time.monotonic()
        file = self._keys.file
        if file is None or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            of_file = _read(file)
        except InvalidArgument as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._entries = of_file + self._keys.fixed
        logger.info("%s was read again and holds %d API keys", file, len(of_file))


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stamp(file: str | None) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file) if file is not None else None
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(file: str) -> tuple[ApiKey, ...]:
    path, plain = Path(file), False
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("api_key_file", f"{file} cannot be read ({type(error).__name__})") from None
    entries = dict[bytes, ApiKey]()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _KEY.fullmatch(words[1]):
            raise InvalidArgument(
                "api_key_file",
                f"{file}:{number}: must be NAME KEY or NAME sha256:HEX (names of at most 64 letters, digits, . _ -; "
                "keys of at most 512 visible ASCII characters)",
            )
        name, key = words
        hashed = _HASHED.fullmatch(key)
        if hashed is None and key.startswith("sha256:"):
            raise InvalidArgument(
                "api_key_file", f"{file}:{number}: sha256: wants 64 hexadecimal digits, in lower case"
            )
        plain = plain or hashed is None
        entry = ApiKey(name, bytes.fromhex(hashed[1]) if hashed else _digest(key))
        if entry.digest in entries:
            raise InvalidArgument("api_key_file", f"{file}:{number}: the key of another line")
        entries[entry.digest] = entry
    if not entries:
        raise InvalidArgument("api_key_file", f"{file} holds no key")
    if plain and path.stat().st_mode & 0o077:
        logger.warning("%s holds keys in plain text that other users of this machine may read", file)
    return tuple(entries.values())
