"""A job's own certificate authority, derived from its secret, so that no certificate has to be distributed.

Each process that has the secret derives the same key, and creates a certificate of the authority with it. These
certificates differ in their dates, and each verifies signatures of the key. An agent that has only its token gets the
certificate with it. Elliptic curve P-256 (FIPS 186-4), which every TLS library speaks.
"""

from __future__ import annotations

import dataclasses
import datetime
import warnings

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from keepstep.trust.tokens import Secret

CONTROLLER_NAME = "controller.keepstep"
"""What the controller's certificate is made out to, at every address: there is one in each job."""
_AUTHORITY_NAME = "keepstep job"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256's group (SEC 2, section 2.4.2)."""
_EARLY, _LATE = datetime.timedelta(days=1), datetime.timedelta(days=3650)
"""Clocks of machines differ; and a job shall not end because of a date."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ServerFiles:
    """What a TLS server shows and proves, all PEM."""

    key: bytes
    certificate: bytes


def authority(secret: Secret) -> bytes:
    """A certificate (PEM) that verifies this job's controller."""
    key = _authority_key(secret)
    own = _certificate(_AUTHORITY_NAME, key, key, is_authority=True)
    return own.public_bytes(serialization.Encoding.PEM)


def is_certificate(pem: bytes) -> bool:
    """Whether this is a certificate. gRPC would say no more of another text than that there is no connection."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what the library only warns of, such as a serial number of 0, is damage
            x509.load_pem_x509_certificate(pem)
    except (ValueError, Warning):
        return False
    return True


def server(secret: Secret) -> ServerFiles:
    """A fresh key for this job's controller, and its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(CONTROLLER_NAME, key, _authority_key(secret), is_authority=False)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return ServerFiles(private, certificate.public_bytes(serialization.Encoding.PEM))


def _authority_key(secret: Secret) -> ec.EllipticCurvePrivateKey:
    number = int.from_bytes(secret.derive("authority") + secret.derive("authority, continued"))
    return ec.derive_private_key(number % (_ORDER - 1) + 1, ec.SECP256R1())


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, *, is_authority: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(_AUTHORITY_NAME))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + _LATE)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
