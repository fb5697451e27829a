"""Stands in for vLLM, of which SGLang imports one kernel where it knows no GPU."""
