"""Moving tensors: which process sends which bytes to which, and the states of an update of weights. Pure, as its
parent."""
