"""What the worker's tests share."""

import warnings

with warnings.catch_warnings():
    # torch.distributed.optim compiles a few functions with the deprecated torch.jit.script when it is imported,
    # and the protected state looks there for ZeroRedundancyOptimizer.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch.distributed.optim  # noqa: F401 - the import itself is what matters here
