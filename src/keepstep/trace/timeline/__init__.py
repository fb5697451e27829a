"""The timeline of a run: its replayed journal, and the phases of its ranks."""
