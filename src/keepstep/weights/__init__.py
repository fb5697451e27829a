"""Moving weights: from the ranks that hold them to replacements and to inference engines. See docs/WEIGHTS.md."""
