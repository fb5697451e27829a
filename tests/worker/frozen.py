"""Imported last by the fork server of `tests.worker.ranks`: what it has imported is out of the collector's sight.

So ranks that look at all objects of their process, as `protect()` does, look at their own.
"""

import gc

gc.collect()
gc.freeze()
