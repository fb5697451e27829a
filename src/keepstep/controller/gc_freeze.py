"""Limits the objects that the garbage collector of a controller's process has to scan."""

from __future__ import annotations

import gc


def set_aside() -> None:
    """The collector no longer looks through the objects that exist now, until this is called again.

    The connections and records of a job's nodes live as long as the job does. With 1,024 nodes a full collection takes
    a tenth of a second, in which the controller answers no message, and it may come between the order to stop and its
    acknowledgements. So the controller calls this at a quiet moment.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
