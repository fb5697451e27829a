"""Agents and controller over a network: gRPC, one bidirectional stream for each agent."""

import os

# gRPC writes what it thinks of each failed handshake to the standard error; who was refused is told by `gate`.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # environ: gRPC takes this setting in no other way
