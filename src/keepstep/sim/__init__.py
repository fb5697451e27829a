"""The simulator: runs a whole job in one process, in virtual time, from one seed, and checks it with an oracle."""
