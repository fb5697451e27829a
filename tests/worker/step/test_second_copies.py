"""Second copies of snapshots: they get to the buddy whole or not at all, and end with the group that carries them."""

import contextlib
import io
import re
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import xxhash
from tests.worker.ranks import DEADLINE_S, Watcher, file_store, meet, run_ranks

from keepstep.protocol.messages import Member, Membership
from keepstep.shared import snapshotfile
from keepstep.shared.snapshotfile import SnapshotFile, WholeSnapshot
from keepstep.shared.tagpage import SnapshotMoment
from keepstep.worker.backends.gloo.communicator import GlooCommunicator
from keepstep.worker.step import second_copies as module
from keepstep.worker.step.second_copies import SecondCopies

APART = Membership.of(Member(rank, f"n{rank}", str(rank)) for rank in range(2))
"""Each rank is the other one's buddy."""
SIZE = 3 * module.CHUNK_BYTES + 12_345


class Rank:
    """One rank with its memory and its group."""

    def __init__(self, path: Path, rank: int, generation: int = 1) -> None:
        self.rank = rank
        self.watcher = Watcher()
        self.group = GlooCommunicator("world", self.watcher)
        timeouts = timedelta(seconds=DEADLINE_S), timedelta(hours=1)
        self.group.connect(file_store(path, generation), rank, APART.world_size, *timeouts)
        self.file = SnapshotFile(snapshotfile.create("test"))
        self.errors: list[str] = []
        self.moments: list[SnapshotMoment] = []
        self.copies = SecondCopies(
            self.file,
            lambda: self.group.background,
            lambda error: self.errors.append(str(error)),
            lambda moment, *_rest: self.moments.append(moment),
        )
        self.copies.resumed(rank, APART, None)

    def take(self, step: int, content: bytes) -> WholeSnapshot:
        """A snapshot of this rank's is whole."""
        slot = self.file.choose(self.rank, self.copies.kept_step)
        self.file.open_for_writing(slot, len(content))[: len(content)] = content
        whole = WholeSnapshot(slot, self.rank, step, len(content), xxhash.xxh3_128_digest(content))
        self.file.seal(whole)
        self.file.leave(slot)
        return whole

    def double(self, step: int, content: bytes) -> None:
        """As in a step in which a snapshot is due."""
        self.copies.hand_out()
        self.copies.send(self.take(step, content))
        self.copies.wait()


def content_of(rank: int, step: int) -> bytes:
    return bytes([rank + 1, step + 1]) * (SIZE // 2)


def doubling(rank: int, num_ranks: int, path: Path) -> tuple[object, list[bytes], int, list[str]]:
    mine = Rank(path, rank)
    for step in (0, 3, 6):
        mine.double(step, content_of(rank, step))
    meet(path, num_ranks, "copied")
    held = mine.copies.held()
    contents = []
    for step in (3, 6):
        with mine.file.read(1 - rank, step) as view:
            contents.append(bytes(view))
    return held, contents, mine.watcher.num_entered + mine.group.num_begun, mine.errors


def test_the_two_newest_of_each_rank_are_with_its_buddy(tmp_path: Path) -> None:
    for rank, (held, contents, num_counted, errors) in enumerate(run_ranks(2, doubling, tmp_path)):
        assert held == ((1 - rank, (3, 6)),)
        assert contents == [content_of(1 - rank, step) for step in (3, 6)]
        assert num_counted == 0, "the group's counters know nothing of it"
        assert errors == []


def sending_again(rank: int, num_ranks: int, path: Path) -> tuple[int, object]:
    """The same step in the next generation, as after a recovery in which all have gone back to it."""
    mine = Rank(path, rank)
    mine.double(4, b"as it is" * 1000)
    num_chunks = 0
    chunks = module._chunks

    def counting(*arguments: object) -> object:
        nonlocal num_chunks
        num_chunks += 1
        return chunks(*arguments)  # type: ignore[arg-type]  # passed on

    mine.copies.resumed(rank, APART, 4)  # waits for what is under way
    module._chunks = counting  # type: ignore[assignment]  # in this process only
    mine.copies.hand_out()
    held = mine.file.find(rank, 4)
    assert held is not None
    mine.copies.send(held)
    mine.copies.wait()
    meet(path, num_ranks, "sent")
    return num_chunks, mine.copies.held()


def test_what_the_buddy_has_is_not_sent_again(tmp_path: Path) -> None:
    assert run_ranks(2, sending_again, tmp_path) == [(0, ((1, (4,)),)), (0, ((0, (4,)),))]


def being_refused(rank: int, num_ranks: int, path: Path, generation: int) -> tuple[list[SnapshotMoment], str, object]:
    """The node of rank 1 has no memory for the copies of steps 4 and 5, and has it for that of step 6."""
    mine = Rank(path, rank, generation)
    free = [100, 100]
    if rank == 1:
        module.free_bytes = lambda: free.pop() if free else 1 << 40
    with contextlib.redirect_stderr(io.StringIO()) as told:
        for step in (4, 5, 6):
            mine.double(step, content_of(rank, step))
            meet(path, num_ranks, f"copied {step}")
    assert mine.errors == []
    return mine.moments, told.getvalue(), mine.copies.held()


@pytest.mark.parametrize("generation", [1, 2], ids=["at the start", "after a recovery"])
def test_a_rank_goes_on_with_one_copy_where_its_buddys_node_has_no_memory(tmp_path: Path, generation: int) -> None:
    (moments, told, held), buddys = run_ranks(2, being_refused, tmp_path, generation)
    assert moments == [SnapshotMoment.REFUSED, SnapshotMoment.REFUSED, SnapshotMoment.DOUBLED]
    warning, then = told.splitlines()
    assert warning.startswith(
        "keepstep: the snapshots of rank 0 have one copy only: node 'n1', where rank 1 would keep the second one, has "
        "no memory for it (2 x 12.6 MB). Training goes on. If this rank's own node is lost, the job goes back to a "
    )
    assert then == "keepstep: the snapshots of rank 0 have a second copy again: rank 1 keeps it"
    assert held == ((1, (5, 6)),)
    assert buddys == ([], "", ((0, (6,)),))


def asking_another_node(rank: int, num_ranks: int, path: Path) -> tuple[str, object]:
    """After a recovery the buddy is on another node, which has no memory either; then again on the same node."""
    mine = Rank(path, rank)
    if rank == 1:
        module.free_bytes = lambda: 100
    with contextlib.redirect_stderr(io.StringIO()) as told:
        for step, node in ((4, "n1"), (5, "n2"), (6, "n2")):
            mine.copies.resumed(rank, Membership.of([Member(0, "n0", "0"), Member(1, node, "1")]), None)
            mine.double(step, content_of(rank, step))
            meet(path, num_ranks, f"copied {step}")
    return told.getvalue(), mine.copies.held()


def test_each_node_without_memory_is_named_once(tmp_path: Path) -> None:
    (told, _held), buddys = run_ranks(2, asking_another_node, tmp_path)
    assert [re.findall(r"one copy only: node '(\w+)'", line) for line in told.splitlines()] == [["n1"], ["n2"]]
    assert buddys == ("", ())


def sending_what_changes(rank: int, num_ranks: int, path: Path) -> tuple[list[str], object]:
    mine = Rank(path, rank)
    whole = mine.take(2, content_of(rank, 2))
    if rank == 0:
        mine.file._maps[whole.slot][module.CHUNK_BYTES] ^= 1
    mine.copies.hand_out()
    mine.copies.send(whole)
    mine.copies.wait()
    meet(path, num_ranks, "sent")
    return mine.errors, mine.copies.held()


def test_damage_on_the_way_counts_for_nothing(tmp_path: Path) -> None:
    (errors, held), (none, theirs) = run_ranks(2, sending_what_changes, tmp_path)
    assert errors == ["the snapshot of step 2 arrived damaged at rank 1"]
    assert (none, theirs, held) == ([], (), ((1, (2,)),))


def being_interrupted(rank: int, _num_ranks: int, path: Path) -> tuple[object, object, list[str]]:
    """Rank 0 is stopped while it waits for a snapshot that rank 1 never sends."""
    mine = Rank(path, rank)
    mine.double(1, content_of(rank, 1))
    if rank == 0:
        mine.copies.hand_out()
        mine.copies.send(mine.take(2, content_of(rank, 2)))
    stopper = threading.Timer(0.2, mine.group.abort)
    stopper.start()
    mine.copies.wait()
    stopper.join()
    assert mine.group.wait_until_quiet(DEADLINE_S)
    mine.group.release()
    before = mine.copies.held()
    again = Rank(path, rank, generation=2)
    mine.group, mine.copies._group_of_generation = again.group, lambda: again.group.background
    mine.copies.resumed(rank, APART, 1)
    mine.double(7, content_of(rank, 7))
    meet(path, 2, "copied")
    return before, mine.copies.held(), [each for each in mine.errors if "damaged" in each]


def test_they_end_with_the_group_and_go_on_in_the_next_generation(tmp_path: Path) -> None:
    for rank, (before, after, damage) in enumerate(run_ranks(2, being_interrupted, tmp_path)):
        assert before == ((1 - rank, (1,)),)
        assert after == ((1 - rank, (1, 7)),)
        assert damage == []


@pytest.mark.parametrize("kept_step", [None, 5])
def test_what_is_of_former_wards_goes_when_all_have_their_snapshots_again(kept_step: int | None) -> None:
    file = SnapshotFile(snapshotfile.create("test"))
    for rank in range(3):
        slot = file.choose(rank, None)
        file.open_for_writing(slot, 3)[:3] = b"abc"
        file.seal(WholeSnapshot(slot, rank, 5, 3, xxhash.xxh3_128_digest(b"abc")))
        file.leave(slot)
    copies = SecondCopies(file, lambda: None, lambda error: None)
    copies.resumed(0, APART, kept_step)
    copies.passed_barrier()
    assert copies.held() == (((1, (5,)), (2, (5,))) if kept_step is None else ((1, (5,)),))
