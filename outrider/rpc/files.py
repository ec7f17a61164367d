"""Room for connections: each takes a file descriptor, and shells often allow 1,024."""

from __future__ import annotations

import logging
import resource

from outrider.rpc.options import MAX_CONNECTIONS

logger = logging.getLogger(__name__)

WANTED = 65_536
_OTHERS = 512
"""Descriptors that a part needs beside its connections: models, logs, libraries."""


def raise_file_limit() -> int:
    """Raises the soft limit as far as the hard one and `WANTED` allow; child processes inherit it.

    Returns:
        The limit now. One that is too small for all connections is logged: connections beyond it are refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < MAX_CONNECTIONS + _OTHERS:
        logger.warning("only %d files may be open (ulimit -n): that is the limit of connections too", soft)
    return soft
