"""Authentication: a job's secret, the tokens derived from it, and its certificates."""
