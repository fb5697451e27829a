"""A driver of one server that kills itself in the middle of a change: ``dying.py URL METHOD before|after``."""

import os
import signal
import sys

from keepstep.engines.server import Version
from keepstep.engines.updates import ServerUpdates
from keepstep.engines.vllm import VLLMServer

url, method, when = sys.argv[1:]
usual = getattr(VLLMServer, method)
is_first = True


def dying(*arguments: object) -> None:
    """The second call is the change's: the first one, if any, ends what was left open before."""
    if when == "after":
        usual(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


updates = ServerUpdates([VLLMServer(url)])
updates.bring(Version(1, "w", ()))
setattr(VLLMServer, method, dying)
updates.bring(Version(2, "w", ()))
