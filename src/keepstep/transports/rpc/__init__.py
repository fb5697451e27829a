"""Agents and controller over a network: gRPC, one bidirectional stream for each agent."""

import os

# gRPC writes about failed handshakes to the standard error, without an address.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # environ: gRPC takes this setting in no other way
