"""Who may say what to whom: a job's secret, the tokens made from it, and its certificates."""
