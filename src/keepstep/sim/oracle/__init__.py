"""The oracle: checks of a run that are independent of the machines."""

from keepstep.sim.oracle.checks import Check, ViolationError
from keepstep.sim.oracle.oracle import Cohort, Oracle

__all__ = ["Check", "Cohort", "Oracle", "ViolationError"]
