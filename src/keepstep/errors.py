"""All exceptions of keepstep, sorted by cause.

::

    KeepstepError
    ├── ConfigurationError      you asked for something that cannot be done
    │   ├── StateMismatch       a rank's model has other names, shapes or dtypes than its replicas
    │   │   ├── UnknownTensor   a consumer wants a tensor that is not published
    │   │   │   └── MissingPart     ... as a part of its own tensor, or no device holds that block
    │   │   ├── ShapeMismatch   a consumer's tensor has another shape than the published one
    │   │   └── DtypeMismatch   a published tensor cannot be cast to the dtype of a consumer's tensor
    │   ├── AmbiguousName       two rules of a name map make the same tensor
    │   ├── BufferUnavailable   there is not enough shared memory for the buffers of a transfer
    │   └── CallRefused         the system lacks a call that keepstep needs, or forbids it
    ├── LimitReached            a limit of the system on processes, threads, open files or memory
    ├── UsageError              a call came at the wrong moment
    │   └── WeightsNotReady     a consumer has no complete version of the weights
    │       └── WeightsPartiallyUpdated   ... because an update was interrupted halfway
    ├── PeerLost                another rank, the agent or the controller is gone
    │   ├── PublisherLost       a process that publishes weights is gone; the message names it
    │   └── SubscriberLost      a process that consumes weights is gone; the message names it
    ├── LeaseLost               another controller serves the run, or may serve it
    ├── LoadError               a consumer's own code raised while it loaded new weights
    ├── ProtocolError           a message violates the protocol
    │   ├── LocalProtocolError  this process was about to send such a message (a bug in keepstep)
    │   └── RemoteProtocolError another process has sent such a message
    │       ├── ChecksumMismatch    the received bytes differ from the sent ones
    │       ├── BaseMismatch        it builds on weights that this consumer does not have
    │       ├── StaleGeneration     its generation is over
    │       └── TokenRefused        its sender has no valid token
    ├── NothingToRecoverFrom    no live rank, snapshot or checkpoint holds some shard
    └── InternalError           an invariant does not hold: a bug in keepstep, please report it

    StepInterrupted             not an error and not an `Exception`: keepstep undoes and repeats the current step

Each error message says what happened, where (generation, rank, step) and what to do about it.
"""


class StepInterrupted(BaseException):
    """Another rank was lost: the current step is interrupted, undone and repeated.

    keepstep raises it in the middle of a step and catches it at the end of the step. Like ``KeyboardInterrupt`` it is a
    ``BaseException``, so ``except Exception`` does not catch it; if other code swallows it, the next stop point raises
    it again.
    """


class KeepstepError(Exception):
    """Base class of all errors of keepstep."""


class ConfigurationError(KeepstepError):
    """A setting, argument or protected object is invalid; the message names it and the allowed values."""


class StateMismatch(ConfigurationError):
    """This rank's protected state has other names, shapes or dtypes than the replica it should equal."""


class UnknownTensor(StateMismatch):
    """A consumer wants a tensor that is not published; the message names it."""


class MissingPart(UnknownTensor):
    """A part of a consumer's tensor is not published, or no device holds it; the message names both tensors."""


class ShapeMismatch(StateMismatch):
    """A consumer's tensor has another shape than the published one; the message names both."""


class DtypeMismatch(StateMismatch):
    """The published dtype cannot be cast to that of a consumer's tensor; the message names both."""


class AmbiguousName(ConfigurationError):
    """Two rules of a name map make the same tensor; the message names it and both rules."""


class BufferUnavailable(ConfigurationError):
    """The buffers of a transfer do not fit into memory; the message contains the requested size."""


class CallRefused(ConfigurationError):
    """The system lacks a call that keepstep needs, or forbids it; the message names the call and a remedy."""


class LimitReached(KeepstepError):
    """A limit of the system on processes, threads, open files or memory; the message names the call and a remedy."""


class UsageError(KeepstepError):
    """A call came at the wrong moment, such as ``optimizer.step()`` outside a step."""


class WeightsNotReady(UsageError):
    """A consumer has no complete version of the weights: none has arrived, or one is being written."""


class WeightsPartiallyUpdated(WeightsNotReady):
    """A consumer's weights are parts of two versions, until the next complete version has arrived."""


class PeerLost(KeepstepError):
    """The other side of a connection is gone, or did not answer within its deadline."""


class PublisherLost(PeerLost):
    """A process that publishes weights died or stalled, so the update was aborted."""


class SubscriberLost(PeerLost):
    """A consumer died or stalled, so it was left out of the update."""


class LeaseLost(KeepstepError):
    """This controller no longer holds the run's lease, so it stops sending."""


class LoadError(KeepstepError):
    """A consumer's ``load`` raised, so it was left out of the update."""


class ProtocolError(KeepstepError):
    """A message is malformed or arrived in a state in which it is not allowed."""


class LocalProtocolError(ProtocolError):
    """This process was about to violate the protocol."""


class RemoteProtocolError(ProtocolError):
    """The other process violated the protocol."""


class ChecksumMismatch(RemoteProtocolError):
    """The received bytes differ from the sent ones."""


class BaseMismatch(RemoteProtocolError):
    """A version omits unchanged parts that this consumer does not have, or the consumer received another version than
    the one that it has to take back."""


class StaleGeneration(RemoteProtocolError):
    """A publisher belongs to a generation that is over."""


class TokenRefused(RemoteProtocolError):
    """The caller has no token, or one of another job, or one for another role."""


class NothingToRecoverFrom(KeepstepError):
    """No live holder of some shard reaches any step, and there is no checkpoint."""


class InternalError(KeepstepError):
    """An invariant does not hold: a bug in keepstep."""
