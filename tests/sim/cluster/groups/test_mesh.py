"""Which groups a mesh has, and that some of them stay in recoveries while others do not."""

from collections.abc import Sequence

import pytest

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.sim.cluster.collectives import WORLD
from keepstep.sim.cluster.groups import registry
from keepstep.sim.cluster.groups.mesh import groups_of, mesh_groups
from keepstep.sim.run import case_of, run

NUM_SEEDS = 300


def test_a_mesh_has_a_group_for_each_copy_of_the_model_and_one_for_each_shard() -> None:
    groups = mesh_groups(("0", "1", "0", "1", "0", "1"))
    assert [group.name for group in groups if not group.holds_one_shard] == ["0-1.0", "2-3.0", "4-5.0"]
    assert [group.members for group in groups if group.holds_one_shard] == [(0, 2, 4), (1, 3, 5)]


def test_every_job_has_the_group_of_all_its_ranks() -> None:
    shards = ("0", "1", "0", "1")
    assert [(group.name, group.members) for group in groups_of(shards, False)] == [(WORLD, (0, 1, 2, 3))]
    assert groups_of(shards, True)[1:] == mesh_groups(shards)


def test_jobs_with_several_shards_and_several_replicas_have_one() -> None:
    layouts = [case_of(seed).layout for seed in range(NUM_SEEDS)]
    assert all(each.has_mesh == (1 < len(set(each.shards)) < each.world_size) for each in layouts)
    assert {each.sends_in_mesh for each in layouts if each.has_mesh} == {True, False}


def test_groups_stay_where_nothing_is_under_way_and_are_rebuilt_where_something_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle says of each whether that is right. Here it is shown that the seeds have both, for every reason."""
    right, reasons = registry.why_rebuilt, list[str | None]()

    def why_rebuilt(claims: Sequence[GroupClaim | None]) -> str | None:
        reasons.append(right(claims))
        return reasons[-1]

    monkeypatch.setattr(registry, "why_rebuilt", why_rebuilt)
    cases = [case for case in map(case_of, range(NUM_SEEDS)) if case.layout.has_mesh]
    outcomes = [run(case) for case in cases]
    assert [outcome.detail for outcome in outcomes if outcome.check is not None] == []
    assert sum(outcome.num_kept_groups > 0 for outcome in outcomes) > 10
    assert sum(outcome.num_kept_groups for outcome in outcomes) > 100
    assert any(reason is not None and "have no whole connections" in reason for reason in reasons)
    assert any(reason is not None and "collectives" in reason for reason in reasons)
    assert any(reason is not None and "messages" in reason for reason in reasons)
