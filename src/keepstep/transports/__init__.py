"""Transports of messages: gRPC, pipes to relays, frames on a byte stream, and queues inside one process."""
