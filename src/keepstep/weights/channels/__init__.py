"""Unix sockets between the processes of one node, each checked for who is at its other end."""
