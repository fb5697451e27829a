"""The agent's machine: how one node obeys orders, and which of its workers hang."""
