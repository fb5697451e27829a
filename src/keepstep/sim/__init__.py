"""The whole job in one process, in virtual time, from one seed: the real machines, a cluster, faults and an oracle."""
