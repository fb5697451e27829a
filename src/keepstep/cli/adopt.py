"""``keepstep adopt``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console

from keepstep.adopt import Advice, Edit, Finding, read
from keepstep.errors import ConfigurationError

WORDS = {
    Edit.REPLACE: "write",
    Edit.INSERT_BEFORE: "insert before it",
    Edit.INSERT_AFTER: "insert after it",
    Edit.REMOVE: "remove it",
    Edit.MOVE: "move it",
}


def main(arguments: list[str]) -> int:
    """Prints which lines of a training script to change. Changes and runs nothing."""
    parser = argparse.ArgumentParser(
        prog="keepstep adopt",
        description="Reads a training script and says which lines to change so that it runs protected. "
        "It neither runs nor changes the script.",
    )
    parser.add_argument("script", metavar="SCRIPT.py", type=Path, help="the script to read")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    advice = read(_text(chosen.script), str(chosen.script))
    if chosen.json:
        print(json.dumps({"script": str(chosen.script), **dataclasses.asdict(advice)}, indent=2))
    else:
        Console(soft_wrap=True).print(story(str(chosen.script), advice), highlight=False, markup=False)
    return 0


def story(name: str, advice: Advice) -> str:
    """Returns the text that the command prints about a script."""
    num = len(advice.findings)
    if not num and not advice.loops:
        return f"{name}: no training loop was found, and nothing to change."
    if not num:
        return f"{name}: nothing to change was found. `keepstep drill` tests whether the weights are identical."
    head = f"{name}: {num} line{'s' if num > 1 else ''} to change"
    return "\n\n".join([head, *map(_paragraph, advice.findings)])


def _paragraph(finding: Finding) -> str:
    instead = finding.instead.splitlines()
    lines = [f"line {finding.line}: {finding.source}"]
    if len(instead) > 1:
        lines += [f"  {WORDS[finding.edit]}:", *(f"    {line}" for line in instead)]
    else:
        lines += [f"  {WORDS[finding.edit]}{': ' if instead else ''}{''.join(instead)}"]
    return "\n".join([*lines, f"  why: {finding.why}"])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: no Python: not UTF-8") from None
