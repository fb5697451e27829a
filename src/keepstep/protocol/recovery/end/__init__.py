"""How a job ends: the verdicts with their exit codes, the stages on the way, and the drain."""
