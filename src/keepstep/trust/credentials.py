"""An agent's credentials, in one text for a file or an environment variable: token and authority's certificate."""

from __future__ import annotations

import dataclasses

from keepstep.errors import ConfigurationError
from keepstep.trust import certificates
from keepstep.trust.tokens import Claim, Secret, mint, name_in


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A token, and the certificate (PEM) of the authority that verifies the controller; None: no TLS."""

    token: str
    authority: bytes | None

    @classmethod
    def of(cls, secret: Secret, claim: Claim) -> Credentials:
        """Creates the credentials for a claim in the job of this secret."""
        return cls(mint(secret, claim), certificates.authority(secret))

    @classmethod
    def parse(cls, text: str, source: str) -> Credentials:
        """Parses the output of `text`.

        Args:
            text: the text.
            source: where it is from, for the error.

        Raises:
            ConfigurationError: the text is not of this form.
        """
        token, _, pem = text.strip().partition("\n")
        if not text.isascii() or token.count(".") != 3 or (pem and not certificates.is_certificate(pem.encode())):
            raise ConfigurationError(f"{source}: must be what `keepstep token --node NAME` prints")
        return cls(token.strip(), pem.encode() if pem else None)

    @property
    def name(self) -> str:
        """The name in the token, unverified."""
        return name_in(self.token)

    def text(self) -> str:
        """Returns the token and then the certificate, as text."""
        return f"{self.token}\n{(self.authority or b'').decode()}".strip()
