"""How one generation of a process group is connected, broken, waited for and given up: gloo, today."""
