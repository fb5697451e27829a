"""Every error keepstep raises, sorted by whose doing it was.

::

    KeepstepError
    ├── ConfigurationError      you asked for something that cannot be done
    │   └── StateMismatch       a rank's model has other names, shapes or dtypes than its replicas
    ├── UsageError              a call came at a moment where it has no meaning
    ├── PeerLost                the world broke: another rank, the agent or the controller is gone
    ├── ProtocolError           a message broke the rules
    │   ├── LocalProtocolError  ... and we were about to send it (a bug of ours)
    │   └── RemoteProtocolError ... and somebody sent it to us
    ├── NothingToRecoverFrom    no live rank, snapshot or checkpoint holds some shard
    └── InternalError           an invariant of keepstep does not hold: our bug, please report it

A message says what happened, to whom (generation, rank, step) and what to do about it.
"""


class KeepstepError(Exception):
    """The root of all errors of keepstep."""


class ConfigurationError(KeepstepError):
    """A setting, argument or protected object cannot work; the message names it and what is allowed."""


class StateMismatch(ConfigurationError):
    """This rank's protected state has other names, shapes or dtypes than the replica it should equal."""


class UsageError(KeepstepError):
    """A call came at the wrong moment, such as ``optimizer.step()`` outside a step."""


class PeerLost(KeepstepError):
    """The other side of a connection is gone, or did not answer within its deadline."""


class ProtocolError(KeepstepError):
    """A message is malformed or came in a state in which it has no meaning."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """The other process broke the protocol."""


class NothingToRecoverFrom(KeepstepError):
    """No live holder of some shard reaches any step, and there is no checkpoint."""


class InternalError(KeepstepError):
    """Something that must always hold does not: a bug in keepstep."""
