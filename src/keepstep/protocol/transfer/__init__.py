"""Moving tensors: who sends which bytes to whom, and what an update of weights goes through. Pure, as its parent."""
