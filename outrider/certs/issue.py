"""Makes an authority and the parts' certificates, as PEM files in one folder.

Each certificate is good for what its part does and no more: draft and target are servers, the coordinator is a server
(its doors) and a client (the links), a probe is a client. A draft's certificate therefore opens no link to the target.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.certs.names import PARTS, Part, authority
from outrider.errors import InvalidArgument

CA_CERT = "ca.pem"
CA_KEY = "ca.key"
CA_DAYS = 3_650
_LOCAL = ("localhost", "127.0.0.1", "::1")
_BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of other machines may be a little behind."""


def issue(folder: Path, hosts: Sequence[str] = (), days: int = 90) -> list[Path]:
    """Writes `ca.pem` and `<part>.pem` with their keys; an authority that is there is kept, certificates are renewed.

    Files are exchanged whole, so that running parts, which read them again, never see half of one.

    Args:
        hosts: further names and addresses under which clients reach the coordinator's doors.
        days: for which the certificates are valid.

    Returns:
        The files written.

    Raises:
        InvalidArgument: a value is out of range, or the folder cannot be used.
    """
    if not 1 <= days <= CA_DAYS:
        raise InvalidArgument("days", f"must be from 1 to {CA_DAYS}, got {days}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        if not (folder / CA_CERT).exists():
            written += _new_authority(folder)
        ca, ca_key = _authority(folder)
        for part in PARTS:
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _certificate(part, key, ca, ca_key, hosts, days)
            # The key first: a certificate never lies beside a key that is older than itself for long.
            written += [
                _write(folder / f"{part}.key", _private(key), 0o600),
                _write(folder / f"{part}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644),
            ]
    except OSError as error:
        raise InvalidArgument("folder", f"{folder} cannot be used ({error.strerror})") from None
    return written


def _new_authority(folder: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Outrider development authority")
    certificate = (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return [
        _write(folder / CA_KEY, _private(key), 0o600),
        _write(folder / CA_CERT, certificate.public_bytes(serialization.Encoding.PEM), 0o644),
    ]


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / CA_CERT).read_bytes())
    except (ValueError, TypeError) as error:
        raise InvalidArgument("folder", f"{folder}: {CA_CERT} and {CA_KEY} cannot be read ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidArgument("folder", f"{folder / CA_KEY} was not made by this command")
    return certificate, key


def _certificate(
    part: Part,
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    days: int,
) -> x509.Certificate:
    names = [authority(part), *_LOCAL, *(hosts if part == "coordinator" else ())]
    uses = [] if part == "probe" else [ExtendedKeyUsageOID.SERVER_AUTH]
    if part in ("coordinator", "probe"):
        uses.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    return (
        _builder(_name(authority(part)), ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> Path:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
    return path
