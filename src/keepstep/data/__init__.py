"""Training data by its position, so that after a recovery there is no iterator to restore.

::

    sequence     | epoch 0: a permutation of range(n)        | epoch 1: another one ...
    global batch | step 0    | step 1    | step 2    | tail  | step 3    | ...
    rank         | 0 | 1 | 2 | 0 | 1 | 2 | 0 | 1 | 2 |dropped| 0 | 1 | 2 | ...

* A **global batch** is ``world_size * batch_size`` consecutive positions of the epoch; rank r reads the r-th run of
  ``batch_size`` of them.
* An epoch has ``n // (world_size * batch_size)`` steps. The samples left over, fewer than one global batch, are
  dropped, so no sample comes twice in an epoch and every batch is full. With ``shuffle`` each epoch drops others;
  without it, always the last ones of the dataset.
* Any step of any epoch is found in constant time and memory: the permutation is computed, never stored.

That is the order of a `StepSampler`, a batch sampler for a torch ``DataLoader``. Every other sampler keeps its own
order. `keepstep.Session.batches` finds the batch of any step in both.
"""

from keepstep.data.order import StepSampler, permute

__all__ = ["StepSampler", "permute"]
