"""The operations in which ranks wait, and the explanation of a hang without an identified cause."""
