"""Studies of keepstep at sizes that the project cannot run, by formula and by simulation."""
