"""Reads a training script, and reports which lines to change so that it survives the loss of a rank.

`read` takes the source text and returns the findings. It never imports or runs the script. The rules use only its text:
names, the order of its lines, and calls of its own functions. A rule that cannot decide reports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.adopt import communication, protection, startup, steps, values
from keepstep.adopt.frameworks import framework_findings
from keepstep.adopt.loops import Survey
from keepstep.adopt.script import Edit, Finding, Script

RULES = (
    startup.joining,
    startup.ranks,
    startup.once,
    protection.refusals,
    protection.protection,
    steps.loops,
    steps.carried,
    steps.updates,
    communication.collectives,
    values.values,
    values.checkpoints,
)
"""The rules. Each finds one kind of line. They apply to scripts whose training loop is not run by a framework."""

__all__ = ["RULES", "Advice", "Edit", "Finding", "read"]


@dataclass(frozen=True)
class Advice:
    """The result of reading a script.

    Attributes:
        findings: the lines to change, in the order of the lines.
        loops: numbers of the lines in which a training loop begins.
    """

    findings: list[Finding]
    loops: list[int]


def read(text: str, name: str = "script") -> Advice:
    """Finds the lines of a training script to change.

    Args:
        text: the source.
        name: name of the file, for errors.

    Raises:
        ConfigurationError: the text is not valid Python.
    """
    survey = Survey(Script(text, name))
    found = framework_findings(survey)
    if found is None:
        found = [finding for rule in RULES for finding in rule(survey)]
    return Advice(
        sorted(dict.fromkeys(found), key=lambda each: each.line), [loop.run.node.lineno for loop in survey.loops]
    )
