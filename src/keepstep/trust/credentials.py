"""An agent's credentials, its token and the authority's certificate, in one text for a file or a variable."""

from __future__ import annotations

import dataclasses

from keepstep.errors import ConfigurationError
from keepstep.trust import certificates
from keepstep.trust.tokens import Claim, Secret, mint, name_in


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A token, and the certificate (PEM) of the authority that vouches for the controller; None: no authority does."""

    token: str
    authority: bytes | None

    @classmethod
    def of(cls, secret: Secret, claim: Claim) -> Credentials:
        """Those of a member of the job that a secret belongs to."""
        return cls(mint(secret, claim), certificates.authority(secret))

    @classmethod
    def parse(cls, text: str, source: str) -> Credentials:
        """What `text` wrote.

        Raises:
            ConfigurationError: it is something else; ``source`` says where it was.
        """
        token, _, pem = text.strip().partition("\n")
        if not text.isascii() or token.count(".") != 3 or (pem and not certificates.is_certificate(pem.encode())):
            raise ConfigurationError(f"{source}: must be what `keepstep token --node NAME` prints")
        return cls(token.strip(), pem.encode() if pem else None)

    @property
    def name(self) -> str:
        """Whom the token is for, as it says itself."""
        return name_in(self.token)

    def text(self) -> str:
        """The token, then the certificate."""
        return f"{self.token}\n{(self.authority or b'').decode()}".strip()
