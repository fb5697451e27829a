"""What connects keepstep with other software; one file for each, none of which is needed by the rest."""
