"""How buckets go over a link: a file for each transport. Messages always go over the link's own connection."""
