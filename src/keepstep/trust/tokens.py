"""A job's secret, and the tokens that identify a caller.

A process that has the secret can create and check a token for any role and name. A token is valid for its own role and
name only, so an agent with only its token cannot impersonate another node. A token is ``ks1.ROLE.NAME.MAC``, where the
last part is HMAC-SHA256 (RFC 2104) of the rest under the secret.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import hashlib
import hmac
import secrets
from pathlib import Path

from keepstep.errors import ConfigurationError, TokenRefused

_PREFIX = "ks1"
_SECRET_BYTES = 32
MAX_TOKEN_CHARS = 1024


class Role(enum.StrEnum):
    """What a token's bearer may do. Workers have no token: each has a socket that it inherits from its agent."""

    AGENT = "agent"
    """Send the reports of one node."""
    RECEIVER = "receiver"
    """Receive published weights on one node."""
    PUBLISHER = "publisher"
    """Serve the published weights of one node to other nodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """The identity of a token's bearer. ``name`` is the node of an agent."""

    role: Role
    name: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """The secret key of one job, on which all its authentication rests. ``repr`` does not show it."""

    key: bytes

    @classmethod
    def new(cls) -> Secret:
        """Creates a random secret."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def parse(cls, text: str, source: str) -> Secret:
        """Parses the output of `text`.

        Args:
            text: the content of a file or variable.
            source: where it is from, for the error.

        Raises:
            ConfigurationError: the text is no secret.
        """
        try:
            key = bytes.fromhex(text.strip())
        except ValueError:
            key = b""
        if len(key) != _SECRET_BYTES:
            raise ConfigurationError(
                f"{source}: must be a job's secret, {2 * _SECRET_BYTES} hexadecimal digits; make one with: "
                "keepstep token --new"
            )
        return cls(key)

    def text(self) -> str:
        """Returns the secret as hexadecimal digits."""
        return self.key.hex()

    def derive(self, purpose: str) -> bytes:
        """Derives a key of 32 bytes for a purpose. It reveals nothing of the secret, or of keys for other purposes."""
        return hmac.digest(self.key, f"keepstep {purpose}".encode(), hashlib.sha256)


def mint(secret: Secret, claim: Claim) -> str:
    """Returns a token for a claim."""
    body = f"{_PREFIX}.{claim.role}.{_armour(claim.name.encode())}"
    return f"{body}.{_armour(_seal(secret, body))}"


def check(secret: Secret, token: str, *roles: Role) -> Claim:
    """Verifies a token, and returns its claim.

    Args:
        secret: the job's secret.
        token: the token, of any length.
        roles: the accepted roles; by default that of an agent.

    Raises:
        TokenRefused: the token is malformed, was not made with this secret, or is for another role.
    """
    if len(token) > MAX_TOKEN_CHARS:
        raise TokenRefused(f"a token of {len(token)} characters: at most {MAX_TOKEN_CHARS} are allowed")
    body, _, seal = token.rpartition(".")
    try:
        prefix, said, name = body.split(".")
        claim, sealed = Claim(Role(said), _bare(name).decode()), _bare(seal)
    except ValueError:
        raise TokenRefused("no token, or not one of keepstep's") from None
    if prefix != _PREFIX or not hmac.compare_digest(sealed, _seal(secret, body)):
        raise TokenRefused(f"the token of {claim.role} {claim.name!r} was not made with this job's secret")
    allowed = roles or (Role.AGENT,)
    if claim.role not in allowed:
        wanted = " or ".join(allowed)
        raise TokenRefused(f"the token of {claim.role} {claim.name!r} is not good for the role of {wanted}")
    return claim


def name_in(token: str) -> str:
    """Returns the name in a token without verifying the token; empty if it contains no readable name."""
    try:
        return _bare(token.split(".")[2]).decode()
    except (ValueError, IndexError):
        return ""


def _seal(secret: Secret, body: str) -> bytes:
    return hmac.digest(secret.derive("tokens"), body.encode(), hashlib.sha256)


def _armour(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bare(text: str) -> bytes:
    """Inverts `_armour`. Accepts only its exact output, because base64 can encode the same bytes in several ways.

    Raises:
        ValueError: the text is not the output of `_armour`.
    """
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _armour(data) != text:
        raise ValueError("not base64 as it is written here")
    return data


def read_private(path: Path, what: str) -> str:
    """Reads a file that only its owner may read.

    Args:
        path: the file.
        what: what the file is, for the error.

    Raises:
        ConfigurationError: the file cannot be read, or other users can read it.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} {path}: {getattr(error, 'strerror', None) or 'not a text'}") from error
    if mode & 0o077:
        raise ConfigurationError(f"{what} {path}: others can read it; run: chmod 600 {path}")
    return text.strip()


def write_private(path: Path, text: str) -> None:
    """Writes a new file that only its owner may read.

    Raises:
        OSError: the file cannot be written, or exists already.
    """
    path.touch(0o600, exist_ok=False)
    path.write_text(text + "\n", encoding="ascii")
