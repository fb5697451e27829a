"""A job's own certificate authority, derived from its secret, so that no certificate has to be distributed.

Each process that has the secret derives the same key, and creates a certificate of the authority with it. These
certificates differ in their dates, but each verifies signatures of the key. An agent that has only a token gets the
certificate with the token. The key is on the elliptic curve P-256 (FIPS 186-4), which every TLS library supports.
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
"""The host name in the controller's certificate, the same for all addresses, because a job has one controller."""
_AUTHORITY_NAME = "keepstep job"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of P-256's group (SEC 2, section 2.4.2)."""
_EARLY, _LATE = datetime.timedelta(days=1), datetime.timedelta(days=3650)
"""Validity of certificates before and after now. The clocks of machines differ, and no job should outlive its
certificates."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ServerFiles:
    """The private key and the certificate of a TLS server, both PEM."""

    key: bytes
    certificate: bytes


def authority(secret: Secret) -> bytes:
    """Returns a certificate (PEM) of the job's authority, with which an agent verifies the controller."""
    key = _authority_key(secret)
    own = _certificate(_AUTHORITY_NAME, key, key, is_authority=True)
    return own.public_bytes(serialization.Encoding.PEM)


def is_certificate(pem: bytes) -> bool:
    """Returns whether a text is a certificate. With an invalid one, gRPC would only report that it cannot connect."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # treat the library's warnings, such as a serial number of 0, as errors
            x509.load_pem_x509_certificate(pem)
    except (ValueError, Warning):
        return False
    return True


def server(secret: Secret) -> ServerFiles:
    """Creates a new key for this job's controller, and its certificate."""
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
