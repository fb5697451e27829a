"""A relay passes on what it has as soon as the controller has taken what came before."""

from keepstep.protocol.relay.bundle import NodeConnected
from keepstep.protocol.relay.gathering import Gathering


def test_one_frame_is_under_way_at_a_time() -> None:
    gathering = Gathering()
    assert gathering.take() is None
    first, second, third = (NodeConnected(f"node-{number}") for number in range(3))
    gathering.add(first)
    assert gathering.take() == (first,)
    gathering.add(second)
    gathering.add(third)
    assert gathering.take() is None
    gathering.taken()
    assert gathering.take() == (second, third)


def test_a_sign_of_life_holds_nothing_and_waits_for_its_turn_too() -> None:
    gathering = Gathering()
    assert gathering.take(even_nothing=True) == ()
    assert gathering.take(even_nothing=True) is None
