"""Tokens: good for one role and name, in one job."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigurationError, TokenRefused
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, check, mint, read_private, write_private

SECRET = Secret(bytes(range(32)))
CLAIM = Claim(Role.AGENT, "node-1")


@given(st.sampled_from(Role), st.text(max_size=100))
def test_a_token_says_who_its_bearer_is(role: Role, name: str) -> None:
    assert check(SECRET, mint(SECRET, Claim(role, name)), role) == Claim(role, name)


def test_a_token_is_good_for_its_own_role() -> None:
    """What may receive weights may not speak for a node of the job."""
    with pytest.raises(TokenRefused, match=r"receiver 'node-1' is not good for the role of agent"):
        check(SECRET, mint(SECRET, Claim(Role.RECEIVER, "node-1")))


def test_a_token_of_another_job_is_refused() -> None:
    with pytest.raises(TokenRefused, match=r"agent 'node-1' was not made with this job's secret"):
        check(SECRET, mint(Secret.new(), CLAIM))


def test_a_token_of_which_one_character_was_changed_is_refused() -> None:
    """Also where base64 would read the same in it: in its other alphabet, or in bits that mean nothing."""
    token = mint(SECRET, CLAIM)
    assert check(SECRET, token) == CLAIM
    assert "_" in token
    for at, own in enumerate(token):
        for other in set(map(chr, range(128))) - {own}:
            with pytest.raises(TokenRefused):
                check(SECRET, token[:at] + other + token[at + 1 :])


@given(st.text(max_size=2000))
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(TokenRefused):
        check(SECRET, text)


def test_a_token_for_another_name_or_role_cannot_be_made_from_one() -> None:
    prefix, role, name, seal = mint(SECRET, CLAIM).split(".")
    other_name = mint(Secret.new(), Claim(Role.AGENT, "node-2")).split(".")[2]
    for forged in (f"{prefix}.{role}.{other_name}.{seal}", f"{prefix}.operator.{name}.{seal}"):
        with pytest.raises(TokenRefused):
            check(SECRET, forged)


def test_a_secret_is_not_shown() -> None:
    credentials = Credentials.of(SECRET, CLAIM)
    for shown in (repr(SECRET), str(SECRET), repr(credentials)):
        assert SECRET.text() not in shown
        assert str(SECRET.key) not in shown
        assert credentials.token not in shown


def test_what_is_written_is_read() -> None:
    assert Secret.parse(SECRET.text() + "\n", "here") == SECRET
    credentials = Credentials.of(SECRET, CLAIM)
    read = Credentials.parse(credentials.text() + "\n", "here")
    assert read.token == credentials.token
    assert read.authority is not None
    assert credentials.authority is not None
    assert read.authority.strip() == credentials.authority.strip()


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33, "0x" + "00" * 32])
def test_what_is_no_secret_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="the variable: must be a job's secret"):
        Secret.parse(text, "the variable")


@pytest.mark.parametrize("text", ["", "no token", "a.b.c", "a.b.c.d\nno certificate"])
def test_what_are_no_credentials_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--token-file: must be what"):
        Credentials.parse(text, "--token-file")


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_private(path, SECRET.text())
    assert read_private(path, "--secret-file") == SECRET.text()
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="others can read it; run: chmod 600"):
        read_private(path, "--secret-file")
    with pytest.raises(FileExistsError):
        write_private(path, "another")
