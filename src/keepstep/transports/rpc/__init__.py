"""The transport between agents and controller over a network: gRPC, with one bidirectional stream for each agent."""

import os

# Otherwise gRPC logs failed handshakes to standard error, without an address.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # environ: gRPC reads this setting from the environment only
