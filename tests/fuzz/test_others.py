"""What else is read that another process has written: tokens, reports of a spawner, files of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.fuzz import inputs

from keepstep.errors import ConfigurationError, RemoteProtocolError, TokenRefused
from keepstep.protocol.controller import JournalEntry
from keepstep.protocol.messages import PhasesObserved
from keepstep.shared.tagpage import PHASES
from keepstep.trace.record import journal, runfolder
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseTail, read_segment
from keepstep.transports.framing import frame
from keepstep.transports.spawning import SpawnerReport, decode_report
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, check, mint, name_in

DEADLINE_S = 20.0
SECRET = Secret(bytes(range(32)))
randoms = st.randoms(use_true_random=False)
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example rewrites it
any_text = st.text(st.characters())  # with lone surrogates: so Python keeps what it cannot decode of a variable


# ---- tokens ---------------------------------------------------------------------------------------------------------

TOKEN = mint(SECRET, Claim(Role.AGENT, "node-1"))
CREDENTIALS = Credentials.of(SECRET, Claim(Role.AGENT, "node-1")).text()


def changed(text: str, random: Random, other: str) -> str:
    """A text in which a piece was replaced."""
    at = random.randint(0, len(text))
    return text[:at] + other + text[at + random.randint(0, 3) :]


@given(randoms, any_text)
@example(Random(1), "\udcff")
def test_a_token_is_good_or_refused(random: Random, other: str) -> None:
    text = changed(TOKEN, random, other) if random.random() < 0.8 else other
    name_in(text)
    try:
        claim = check(SECRET, text)
    except TokenRefused:
        return
    assert claim == Claim(Role.AGENT, "node-1")


@given(randoms, any_text)
@example(Random(1), "\udcff")
def test_credentials_are_read_or_refused(random: Random, other: str) -> None:
    try:
        found = Credentials.parse(changed(CREDENTIALS, random, other), "here")
    except ConfigurationError:
        return
    assert found.token.isascii()
    assert isinstance(found.name, str)
    assert isinstance(found.text(), str)


@given(any_text)
def test_a_secret_is_read_or_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="here: must be"):
        Secret.parse(text, "here")


# ---- files of a run -------------------------------------------------------------------------------------------------


def written(folder: Path, random: Random) -> tuple[Path, list[JournalEntry]]:
    """A journal, and what is in it."""
    path = folder / "journal.jsonl"
    path.unlink(missing_ok=True)
    entries = [inputs.instance(JournalEntry, random) for _ in range(random.randint(1, 4))]
    with journal.Journal(path) as new:
        new.write(entries)
    return path, entries


@in_one_folder
@given(random=randoms)
def test_a_damaged_journal_is_refused_or_ends_early(random: Random, tmp_path: Path) -> None:
    """No line of it is ever read as something else; and who writes on begins where it ends."""
    path, entries = written(tmp_path, random)
    path.write_bytes(inputs.damaged(path.read_bytes(), random))
    try:
        found = journal.read(path)
    except ConfigurationError:
        return
    assert all(entry in entries for entry in found)
    with journal.Journal(path) as again:
        again.write(entries[:1])
    assert journal.read(path) == [*found, entries[0]]


@in_one_folder
@given(random=randoms)
def test_a_journal_that_grows_is_read_line_by_line(random: Random, tmp_path: Path) -> None:
    path, entries = written(tmp_path, random)
    pieces = inputs.split(path.read_bytes(), random)
    path.write_bytes(b"")
    tail, found = journal.JournalTail(path), []
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        found += tail.read()
    assert found == entries


@in_one_folder
@given(random=randoms)
def test_a_journal_with_other_words_under_a_right_checksum_is_refused(random: Random, tmp_path: Path) -> None:
    """As a later version might write it; or another process, which then could write anything."""
    path, _entries = written(tmp_path, random)
    body = journal._opened(path.read_bytes().split(b"\n")[0])
    path.write_bytes(journal._sealed(inputs.damaged(body[:-1], random).replace(b"\n", b"") + b"}") + b"\n")
    try:
        (found,) = journal.read(path)
    except ConfigurationError:
        return
    assert isinstance(found, JournalEntry)


DEEP = b"[" * 100_000


@pytest.mark.parametrize("text", [b'{"x":' + DEEP, b'{"event":' + DEEP, DEEP], ids=["unknown", "known", "all"])
def test_deep_files_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / runfolder.JOURNAL).write_bytes(journal._sealed(text + b"}") + b"\n")
    with pytest.raises(ConfigurationError, match="line 1: not an entry"):
        journal.read(tmp_path / runfolder.JOURNAL)
    (tmp_path / runfolder.INFO).write_bytes(text)
    with pytest.raises(ConfigurationError, match="not what keepstep writes"):
        runfolder.read_info(tmp_path)


def observed(random: Random) -> PhasesObserved:
    """Phases as an agent sends them."""
    phases = random.randbytes(PHASE_DTYPE.itemsize * random.randint(0, 3))
    last = len(phases) - len(phases) % PHASE_DTYPE.itemsize
    whole = bytearray(phases[:last])
    for at in range(PHASE_DTYPE.fields["phase"][1], last, PHASE_DTYPE.itemsize):
        whole[at : at + 4] = random.randrange(len(PHASES)).to_bytes(4, "little")
    return PhasesObserved("node-1", 0, bytes(whole))


@in_one_folder
@given(random=randoms)
def test_a_damaged_log_of_phases_is_read_or_refused(random: Random, tmp_path: Path) -> None:
    path = tmp_path / "00000001.frames"
    whole = b"".join(frame(observed(random)) for _ in range(random.randint(1, 4)))
    path.write_bytes(whole)
    num_records = len(read_segment(path))
    path.write_bytes(inputs.damaged(whole, random))
    with contextlib.closing(PhaseTail(tmp_path)) as tail, contextlib.suppress(RemoteProtocolError):
        assert len(list(tail.read())) <= 8
        assert len(read_segment(path)) <= 4 * num_records + 12


# ---- a spawner's reports --------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
@example(b'{"type":"SpawnerReady","worker_bytes":' + b"[" * 4000)
@example(b'{"type":"SpawnerReady\xff"')
@example(b"[" * 4000)
def test_a_report_of_a_spawner_is_one_or_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(decode_report(data), SpawnerReport)
