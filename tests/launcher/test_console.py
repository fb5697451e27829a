"""What the console of a job shows of texts that nodes and scripts have sent."""

import io

import pytest
from rich.console import Console

from keepstep.cli.terminal.screen import _flat
from keepstep.launcher.cluster.node import _tell_trouble
from keepstep.launcher.cluster.service import Refusals
from keepstep.launcher.console import _print_news
from keepstep.trace.weights.publications import Publication, describe_publication, publication_text

SENT = "node a left: \x1b]0;title\x07\x9b2J \u202e[bold] caf\u00e9\tand\nmore"
SHOWN = "node a left: \\x1b]0;title\\x07\\x9b2J \\u202e[bold] caf\u00e9"


def test_a_terminal_finds_nothing_to_obey_in_them() -> None:
    file = io.StringIO()
    _print_news(Console(file=file, soft_wrap=True), iter([SENT, None]))
    assert file.getvalue().expandtabs() == f"keepstep: {SHOWN}\tand\nmore\n".expandtabs()
    assert _flat(SENT) == f"{SHOWN} and more"


def test_nor_in_what_is_said_of_connections_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    Refusals().tell("10.0.0.1:5", SENT)
    _tell_trouble(SENT, was_connected=True)
    _tell_trouble(SENT, was_connected=False)
    lines = f"{SHOWN}\tand\nmore\n"
    assert capsys.readouterr().err == (
        f"keepstep: refused 10.0.0.1:5: {lines}keepstep: no connection to the controller, training continues: {lines}"
        f"keepstep: no connection to a controller yet: {lines}"
    )
    assert publication_text(describe_publication(Publication(SENT), 0.0)).startswith(f"weights in {SHOWN}\tand")
