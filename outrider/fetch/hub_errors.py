"""Hub failures as one line with its remedy.

Classified by exception name and text along the chain of causes, because the HTTP library underneath
`huggingface_hub` differs between its versions.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

_CERTIFICATE_SIGNS = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "SSLCertVerificationError", "SSLError")
_UNREACHABLE_SIGNS = ("Connect", "Timeout", "NetworkError", "RemoteProtocolError", "MaxRetryError", "NameResolution")


def explain(error: BaseException, model_id: str, revision: str | None, endpoint: str, place: Path) -> str:
    """Why `model_id` could not be had from the hub at `endpoint`, and what to do about it."""
    chain = list(_chain(error))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    text = " ".join(f"{type(link).__name__} {link}" for link in chain)
    status = next((code for link in chain if (code := _http_status(link)) is not None), None)
    page = f"{endpoint}/{model_id}"
    at_revision = f" at revision {revision!r}" if revision else ""

    if disk := _disk(chain, place):
        return f"{model_id}: {disk}"
    if "OfflineModeIsEnabled" in names:
        return (
            f"{model_id}{at_revision} is not in the cache ({place}) and HF_HUB_OFFLINE is set; "
            "unset it, or fetch the model on a machine with a network and copy the cache"
        )
    if "GatedRepoError" in names:
        return gated(model_id, page)
    if "RevisionNotFoundError" in names:
        return f"{model_id} has no revision {revision!r}; see {page}/commits for those it has"
    if "RepositoryNotFoundError" in names or status == 401:
        return f"{model_id} was not found at {endpoint}: check the spelling; if it is private, set HF_TOKEN"
    if any(sign in text for sign in _CERTIFICATE_SIGNS):
        return (
            f"the certificate of {endpoint} was not accepted, so {model_id} could not be fetched; "
            "behind an intercepting proxy set SSL_CERT_FILE to its root certificate"
        )
    if "ProxyError" in names or status == 407:
        return f"the proxy refused the way to {endpoint} ({_short(chain)}); check HTTPS_PROXY and NO_PROXY"
    if status == 403:
        return f"{endpoint} refuses {model_id} (403): the token in HF_TOKEN lacks access; see {page}"
    if status == 429:
        return f"{endpoint} limits the rate of requests (429): set HF_TOKEN or try again later"
    if status is not None and status >= 500:
        return f"{endpoint} is failing ({status}): try again later; what has been fetched is kept"
    if any(sign in name for name in names for sign in _UNREACHABLE_SIGNS):
        return (
            f"{model_id}{at_revision} is not in the cache ({place}) and {endpoint} cannot be reached "
            f"({_short(chain)}); check the network, HTTPS_PROXY and HF_ENDPOINT"
        )
    return f"fetching {model_id} failed ({_short(chain)}); the same command goes on where it stopped"


def gated(model_id: str, page: str) -> str:
    """The line for a model whose licence has to be accepted first."""
    return f"{model_id} is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account"


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _disk(chain: list[BaseException], place: Path) -> str | None:
    for link in chain:
        code = link.errno if isinstance(link, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT):
            return f"disk full: no space left in {place}; make room or set HF_HOME to another disk"
        if code in (errno.EACCES, errno.EROFS, errno.EPERM):
            return f"cannot write to {place}; set HF_HOME to a folder of your own"
    return None


def _http_status(link: BaseException) -> int | None:
    status = getattr(getattr(link, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _short(chain: list[BaseException]) -> str:
    deepest = next((link for link in reversed(chain) if str(link).strip()), chain[0])
    return f"{type(deepest).__name__}: {str(deepest).strip().splitlines()[0][:160]}" if str(deepest) else "no details"
