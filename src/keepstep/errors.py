"""Every error keepstep raises, sorted by whose doing it was.

::

    KeepstepError
    ├── ConfigurationError      you asked for something that cannot be done
    │   ├── StateMismatch       a rank's model has other names, shapes or dtypes than its replicas
    │   │   ├── UnknownTensor   a consumer wants a tensor that is not published
    │   │   │   └── MissingPart     ... as a part of one of its own, or no device holds that block
    │   │   ├── ShapeMismatch   ... in another shape than it has
    │   │   └── DtypeMismatch   ... in a dtype to which it cannot be cast
    │   ├── AmbiguousName       two rules of a name map make the same tensor
    │   └── BufferUnavailable   there is not enough shared memory for the buffers of a transfer
    ├── UsageError              a call came at a moment where it has no meaning
    │   └── WeightsNotReady     a consumer has no whole version of the weights to use
    │       └── WeightsPartiallyUpdated   ... because an update broke off half-way
    ├── PeerLost                the world broke: another rank, the agent or the controller is gone
    │   ├── PublisherLost       ... a process that publishes weights, named
    │   └── SubscriberLost      ... a process that consumes them, named
    ├── LeaseLost               another controller serves the run by now, or may
    ├── LoadError               a consumer's own code raised while it loaded new weights
    ├── ProtocolError           a message broke the rules
    │   ├── LocalProtocolError  ... and we were about to send it (a bug of ours)
    │   └── RemoteProtocolError ... and another process sent it to us
    │       ├── ChecksumMismatch    ... with other bytes than were sent
    │       ├── BaseMismatch        ... and builds on weights that are not here
    │       ├── StaleGeneration     ... and its generation is over
    │       └── TokenRefused        ... and could not show that it may
    ├── NothingToRecoverFrom    no live rank, snapshot or checkpoint holds some shard
    └── InternalError           an invariant of keepstep does not hold: our bug, please report it

    StepInterrupted             no error and no `Exception`: the step that is being computed is undone and comes again

A message says what happened, to whom (generation, rank, step) and what to do about it.
"""


class StepInterrupted(BaseException):
    """Another rank was lost: the step that this one is computing is left, undone, and handed out again.

    It is raised in the middle of a step and caught at its end. Like ``KeyboardInterrupt`` it is no ``Exception``, so
    that handlers of errors let it pass; where one does not, the next stop point raises it again.
    """


class KeepstepError(Exception):
    """The root of all errors of keepstep."""


class ConfigurationError(KeepstepError):
    """A setting, argument or protected object cannot work; the message names it and what is allowed."""


class StateMismatch(ConfigurationError):
    """This rank's protected state has other names, shapes or dtypes than the replica it should equal."""


class UnknownTensor(StateMismatch):
    """A consumer wants a tensor that is not published; the message names it."""


class MissingPart(UnknownTensor):
    """A part of a consumer's tensor is not published, or is held by no device; the message names both tensors."""


class ShapeMismatch(StateMismatch):
    """A consumer's tensor has another shape than what is published gives; the message names both."""


class DtypeMismatch(StateMismatch):
    """A consumer's tensor has a dtype to which what is published is not cast; the message names both."""


class AmbiguousName(ConfigurationError):
    """Two rules of a name map make the same tensor; the message names it and both rules."""


class BufferUnavailable(ConfigurationError):
    """The buffers of a transfer do not fit into memory; the message says how much was asked for."""


class UsageError(KeepstepError):
    """A call came at the wrong moment, such as ``optimizer.step()`` outside a step."""


class WeightsNotReady(UsageError):
    """A consumer's weights are not a whole version at the moment: none has come, or one is just being written."""


class WeightsPartiallyUpdated(WeightsNotReady):
    """A consumer's weights are half of one version and half of another, until the next whole one has come."""


class PeerLost(KeepstepError):
    """The other side of a connection is gone, or did not answer within its deadline."""


class PublisherLost(PeerLost):
    """A process that publishes weights died or stopped moving, so the update does not count."""


class SubscriberLost(PeerLost):
    """A consumer died or stopped moving, so it was left out of the update."""


class LeaseLost(KeepstepError):
    """This controller cannot show any more that it is the one that serves the run, so it is silent from now on."""


class LoadError(KeepstepError):
    """A consumer's ``load`` raised, so it was left out of the update."""


class ProtocolError(KeepstepError):
    """A message is malformed or came in a state in which it has no meaning."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """The other process broke the protocol."""


class ChecksumMismatch(RemoteProtocolError):
    """Bytes arrived that are not those that were sent."""


class BaseMismatch(RemoteProtocolError):
    """What has not changed is left out of a version, and it is not what this consumer has; or another version comes
    than the one that is taken back."""


class StaleGeneration(RemoteProtocolError):
    """A publisher speaks for a generation that is over."""


class TokenRefused(RemoteProtocolError):
    """The caller has no token, or one of another job, or one for another role."""


class NothingToRecoverFrom(KeepstepError):
    """No live holder of some shard reaches any step, and there is no checkpoint."""


class InternalError(KeepstepError):
    """Something that must always hold does not: a bug in keepstep."""
