"""`everfed flower keys`: certificates for a federation's link and a key pair for every site."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from everfed.errors import EverfedError

YEARS = 5
AUTHORITY = "everfed federation"
Key = ec.EllipticCurvePrivateKey


def certificates(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """An authority's certificate, and one with its key for the server; names or addresses that
    sites know the server by. The authority's key is thrown away."""
    if (folder / "ca.crt").exists():
        raise EverfedError(
            f"{folder} has the server's certificates already; remove ca.crt there to make new "
            "ones, which all sites need then"
        )
    authority, server = _key(), _key()
    signs = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    itself = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = _certificate(
        AUTHORITY, authority, authority, [x509.BasicConstraints(True, 0), signs, itself]
    )
    extensions = [
        x509.BasicConstraints(False, None),
        x509.SubjectAlternativeName([_host(host) for host in hosts]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
    ]
    own = _certificate(hosts[0], server, authority, extensions)
    secret = server.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return [
        _save(folder / "ca.crt", root.public_bytes(Encoding.PEM)),
        _save(folder / "server.crt", own.public_bytes(Encoding.PEM)),
        _save(folder / "server.key", secret, secret=True),
    ]


def site(folder: Path, name: str) -> list[Path]:
    """A site's key pair; one that is there already is kept."""
    if not re.fullmatch(r"\w[\w.-]*", name) or name in ("ca.crt", "server.crt", "server.key"):
        raise EverfedError(f"{name!r} is no name for a site: use letters, numbers, . _ -")
    if (folder / name).exists():
        return []
    key = _key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return [
        _save(folder / name, private, secret=True),
        _save(folder / f"{name}.pub", public + b"\n"),
    ]


def _key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _certificate(
    name: str, key: Key, signer: Key, extensions: Sequence[x509.ExtensionType]
) -> x509.Certificate:
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(_title(name))
        .issuer_name(_title(AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365 * YEARS))
    )
    for extension in extensions:
        made = made.add_extension(extension, isinstance(extension, x509.BasicConstraints))
    return made.sign(signer, hashes.SHA384())


def _title(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _save(path: Path, content: bytes, secret: bool = False) -> Path:
    """A file that was never readable for others, if it is secret."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if secret else 0o644
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
    return path
