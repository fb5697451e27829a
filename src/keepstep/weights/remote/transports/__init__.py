"""The transports of buckets on a link, one per file. Messages always go over the link's own connection."""
