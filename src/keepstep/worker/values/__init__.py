"""The script's own values in protected host state, replicated or rank-local."""
