"""The oracle: what must be true of a run, checked by one that stands outside of the machines."""

from keepstep.sim.oracle.checks import Check, ViolationError
from keepstep.sim.oracle.oracle import Cohort, Oracle

__all__ = ["Check", "Cohort", "Oracle", "ViolationError"]
