"""The machine of one node: what it does on orders, and which of its workers hang."""
