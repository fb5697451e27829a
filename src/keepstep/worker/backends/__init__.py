"""How one generation of a process group is connected, aborted and waited for, by backend."""
