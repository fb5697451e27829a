"""What the console of a job shows of texts that nodes and scripts have sent."""

import io

from rich.console import Console

from keepstep.cli.terminal.screen import _flat
from keepstep.launcher.console import _print_news

SENT = "node a left: \x1b]0;title\x07\x9b2J \u202e[bold] caf\u00e9\tand\nmore"
SHOWN = "node a left: \\x1b]0;title\\x07\\x9b2J \\u202e[bold] caf\u00e9"


def test_a_terminal_finds_nothing_to_obey_in_them() -> None:
    file = io.StringIO()
    _print_news(Console(file=file, soft_wrap=True), iter([SENT, None]))
    assert file.getvalue().expandtabs() == f"keepstep: {SHOWN}\tand\nmore\n".expandtabs()
    assert _flat(SENT) == f"{SHOWN} and more"
