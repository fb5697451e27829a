"""Unix sockets between processes on one node. Each end checks that its peer runs as the same user."""
