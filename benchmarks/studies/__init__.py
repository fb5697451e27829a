"""Studies: questions about keepstep at sizes that nobody here can run, answered by formula and by simulation."""
