"""Transfers of weights: which process sends which bytes to which, and the states of an update. Pure, like
`keepstep.protocol`."""
