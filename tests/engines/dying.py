"""A driver of one server that kills itself in a change: ``dying.py vllm|sglang URL METHOD before|after [FILES]``."""

import os
import signal
import sys
from pathlib import Path

from keepstep.engines.server import NewVersion
from keepstep.engines.sglang import SGLangServer
from keepstep.engines.updates import ServerUpdates
from keepstep.engines.vllm import VLLMServer

kind, url, method, when, *files = sys.argv[1:]
server = {"vllm": VLLMServer, "sglang": SGLangServer}[kind]
usual = getattr(server, method)
path = Path(files[0]) if files else None
tensors = (("a.weight", "float32", (2, 2)),)


def dying(*arguments: object) -> None:
    if when == "after":
        usual(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


updates = ServerUpdates([server(url)], memory=path.parent if path else "/dev/shm")
if path is not None and updates.files is not None:
    path = path.rename(updates.files / path.name)
updates.bring(NewVersion(1, "w", tensors, path))
setattr(server, method, dying)
updates.bring(NewVersion(2, "w", tensors, path))
