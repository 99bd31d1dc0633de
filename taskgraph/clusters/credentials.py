"""Certificates that a launcher makes for one job, whose nodes have no lasting names of their own."""

from __future__ import annotations

import datetime

from taskgraph.errors import JobError
from taskgraph.network.tls import CA, CERT, KEY

__all__ = ["certificate_name", "job_certificates"]

_BEFORE = datetime.timedelta(minutes=5)
"""A certificate is valid this long before it is made: clocks of a cluster differ a little."""
_DAYS = 366
_LONGEST = 63
"""Characters of a label in a host's name."""


def certificate_name(job: str) -> str:
    """Returns the name in the certificates of a job's nodes (`--tls-name`): the job's, spelled as a host's."""
    letters = (c if c.isascii() and c.isalnum() else "-" for c in job.lower())
    return "".join(letters)[:_LONGEST].strip("-") or "taskgraph"


def job_certificates(name: str) -> dict[str, bytes]:
    """Makes an authority and one certificate, which all nodes and clients of a job share.

    The authority's key is thrown away, so that nothing else can be signed by it.

    Args:
        name: the only name in the certificate: nodes and clients take it as `--tls-name`.

    Returns:
        The files by their names: ca.pem, cert.pem, key.pem (PEM; the key is not encrypted).

    Raises:
        JobError: the extra `tls` is missing.
    """
    try:
        import trustme
    except ImportError as error:
        raise JobError(
            "certificates for the job's nodes need the package trustme: `pip install 'taskgraph-aio[tls]'`; or give "
            "your own with --tls DIR"
        ) from error
    now = datetime.datetime.now(datetime.UTC)
    ca = trustme.CA(path_length=0)
    end = now + datetime.timedelta(days=_DAYS)
    cert = ca.issue_cert(name, common_name="taskgraph node", not_before=now - _BEFORE, not_after=end)
    return {CA: ca.cert_pem.bytes(), CERT: cert.cert_chain_pems[0].bytes(), KEY: cert.private_key_pem.bytes()}
