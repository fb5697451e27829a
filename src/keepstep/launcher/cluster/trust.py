"""Authentication in a job on several nodes: secret, credentials and certificates from flags and variables."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from keepstep import config
from keepstep.errors import ConfigurationError
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, read_private

HOW_TO_SHARE = (
    f"make a secret once with 'keepstep token --new', give it to every node as {config.SECRET_VARIABLE} or as a file "
    "with --secret-file, and keep it from all others"
)


def secret_of(arguments: argparse.Namespace) -> Secret | None:
    """Returns the job's secret from ``--secret-file`` or the environment; None if neither is set.

    Raises:
        ConfigurationError: the file cannot be read, or does not contain a secret.
    """
    if arguments.secret_file is not None:
        return Secret.parse(read_private(Path(arguments.secret_file), "--secret-file"), "--secret-file")
    text = config.job_secret()
    return None if text is None else Secret.parse(text, config.SECRET_VARIABLE)


def credentials_of(arguments: argparse.Namespace, node: str) -> tuple[Credentials, str | None]:
    """Returns this node's credentials and the name that the controller's certificate must have (None: its address).

    Raises:
        ConfigurationError: there are no credentials, they cannot be read, or they belong to another node.
    """
    text = config.agent_token()
    if arguments.token_file is not None:
        found = Credentials.parse(read_private(Path(arguments.token_file), "--token-file"), "--token-file")
    elif text is not None:
        found = Credentials.parse(text, config.TOKEN_VARIABLE)
    elif (secret := secret_of(arguments)) is not None:
        found = Credentials.of(secret, Claim(Role.AGENT, node))
    else:
        raise ConfigurationError(f"several nodes need a secret that they share: {HOW_TO_SHARE}")
    if found.name != node:
        raise ConfigurationError(f"the credentials are those of node {found.name!r}, and this is {node!r}")
    return believing(found, arguments.tls)


def believing(found: Credentials, tls: str) -> tuple[Credentials, str | None]:
    """Returns credentials with the certificate authority that ``--tls`` selects.

    The second value is the name that the controller's certificate must have (None: its address).

    Raises:
        ConfigurationError: the credentials have no authority, or its file cannot be read.
    """
    if tls == "off":
        return dataclasses.replace(found, authority=None), None
    if tls == "auto":
        if found.authority is None:
            raise ConfigurationError("--tls auto: the credentials hold no certificate of the job's authority")
        return found, certificates.CONTROLLER_NAME
    return dataclasses.replace(found, authority=_read(tls.split(",")[-1])), None


def server_files_of(tls: str, secret: Secret) -> certificates.ServerFiles | None:
    """Returns the controller's certificate and key that ``--tls`` selects; None without TLS.

    Raises:
        ConfigurationError: a file cannot be read, or ``--tls`` does not name three files.
    """
    if tls == "off":
        return None
    if tls == "auto":
        return certificates.server(secret)
    files = tls.split(",")
    if len(files) != 3:
        raise ConfigurationError(f"--tls {tls}: must be auto, off, or CERTIFICATE,KEY,AUTHORITY")
    return certificates.ServerFiles(key=_read(files[1]), certificate=_read(files[0]))


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"--tls {name}: {error.strerror}") from error
