"""In host memory a bucket is copied twice: into its source's buffer, and from there by each consumer of any device."""

import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import publish, subscribe
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.errors import PublisherLost
from keepstep.weights.device.device import Settings
from keepstep.weights.memory.buffers import SlotBuffer

DEVICES = 2


def own_tensor(rank: int, version: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"of rank {rank}": torch.full((200,), version)}


def file_of(buffer: object) -> int:
    """The inode of a buffer's memory file."""
    assert isinstance(buffer, SlotBuffer)
    return os.fstat(buffer.descriptor).st_ino


def file_at(address: int) -> int:
    """The inode of what is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _rights, _offset, _device, inode, *_name = line.split()
        begin, end = (int(each, 16) for each in addresses.split("-"))
        if begin <= address < end:
            return int(inode)
    raise AssertionError(f"nothing is mapped at {address:#x}")


def where_it_is_read(rank: int, size: int, path: Path, is_late: bool) -> Any:
    """Each device has a tensor of its own; the only consumer is on the first one."""
    if rank < DEVICES:
        with publish(path, own_tensor(rank), rank, DEVICES, copies=is_late) as publisher:
            if rank == 0 and not is_late:
                publisher.wait_for_consumers(1, DEADLINE_S)
            publisher.publish(1)
            meet(path, size, "published")
            meet(path, size, "through")
            late = publisher._late_subscribers._buffers.get("h2d")
            return file_of(late if is_late else publisher._device.h2d), set(publisher._late_subscribers._buffers)
    found: dict[str, int] = {}
    if is_late:
        meet(path, size, "published")
    with subscribe(path, load=lambda name, tensor: found.update({name: file_at(tensor.data_ptr())})) as consumer:
        consumer.receive(DEADLINE_S)
        if not is_late:
            meet(path, size, "published")
        meet(path, size, "through")
    return found


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
def test_a_consumer_reads_where_each_source_has_written(is_late: bool, tmp_path: Path) -> None:
    *sources, found = run_ranks(DEVICES + 1, where_it_is_read, tmp_path, is_late)
    assert found == {f"of rank {rank}": file for rank, (file, _others) in enumerate(sources)}
    assert [others for _file, others in sources] == [{"h2d"} if is_late else set()] * DEVICES, "and no others are made"


def dies_while_it_is_read(rank: int, size: int, path: Path) -> Any:
    """The second device is killed while the consumer of the first one reads in its buffer."""
    if rank < DEVICES:
        live = own_tensor(rank)
        with publish(path, live, rank, DEVICES) as publisher:
            if rank == 0:
                publisher.wait_for_consumers(1, DEADLINE_S)
            publisher.publish(1)
            live[f"of rank {rank}"].fill_(2.0)
            if rank == 1:
                threading.Thread(target=die_while_read, args=[path]).start()
            with pytest.raises(PublisherLost) as caught:
                publisher.publish(2)
            meet(path, size - 1, "through")
            return str(caught.value)
    seen: list[float] = []
    own = {name: tensor for rank in range(DEVICES) for name, tensor in own_tensor(rank, 0.0).items()}

    def load(name: str, tensor: torch.Tensor) -> None:
        if name == "of rank 1" and float(tensor[0]) == 2.0:
            pidfd = os.pidfd_open(int((path / "pid").read_text()))
            meet(path, 2, "it is being read")
            select.select([pidfd], [], [], DEADLINE_S)
            seen.extend(tensor.unique().tolist())
        own[name].copy_(tensor)

    with subscribe(path, load=load) as consumer:
        versions = [consumer.receive(DEADLINE_S)]
        with pytest.raises(PublisherLost):
            consumer.receive(DEADLINE_S)
        meet(path, size - 1, "through")
        return versions, consumer.version, seen, str(consumer.condition)


def die_while_read(path: Path) -> None:
    (path / "pid.new").write_text(str(os.getpid()))
    (path / "pid.new").rename(path / "pid")
    meet(path, 2, "it is being read")
    os.kill(os.getpid(), signal.SIGKILL)


def test_memory_of_a_source_that_dies_stays_readable_and_its_version_breaks_off(tmp_path: Path) -> None:
    first, _killed, consumer = run_ranks(DEVICES + 1, dies_while_it_is_read, tmp_path, silent=frozenset({1}))
    assert first.startswith("version 2 was not published: rank 1: ")
    assert consumer == ([1], 1, [2.0], "partially updated")


def replaced(rank: int, size: int, path: Path) -> Any:
    """The second device is replaced between two versions: consumers of the first one map its new buffer."""
    if rank < DEVICES:
        for first in (1, 3) if rank == 1 else (1,):
            live = own_tensor(rank)
            with publish(path, live, rank, DEVICES) as publisher:
                if rank == 0:
                    publisher.wait_for_consumers(1, DEADLINE_S)
                for version in range(first, first + 2 if rank == 1 else first + 4):
                    meet(path, DEVICES, f"version {version}")
                    live[f"of rank {rank}"].fill_(version)
                    publisher.publish(version)
        return None
    own = {name: tensor for rank in range(DEVICES) for name, tensor in own_tensor(rank, 0.0).items()}
    with subscribe(path, into=own) as consumer:
        story = []
        for _version in range(4):
            version = consumer.receive(DEADLINE_S)
            story.append((version, {float(value) for tensor in own.values() for value in tensor}))
        return story


def test_a_source_that_is_replaced_has_another_buffer(tmp_path: Path) -> None:
    *_sources, story = run_ranks(DEVICES + 1, replaced, tmp_path)
    assert story == [(version, {float(version)}) for version in range(1, 5)]


def by_way_of_another_buffer(rank: int, size: int, path: Path, is_late: bool) -> Any:
    """As on GPUs, which copy what comes to a buffer of the device's own; here both buffers are in host memory."""
    Settings.has_ipc = property(lambda self: True)  # type: ignore[assignment]  # in this process alone
    if rank < DEVICES:
        with publish(path, own_tensor(rank), rank, DEVICES, copies=is_late) as publisher:
            if rank == 0 and not is_late:
                publisher.wait_for_consumers(1, DEADLINE_S)
            publisher.publish(1)
            meet(path, size, "published")
            meet(path, size, "through")
            assert publisher._device.ipc is not None
            late = publisher._late_subscribers._buffers.get("ipc")
            return file_of(late) if is_late and rank == 0 else file_of(publisher._device.ipc)
    found: dict[str, tuple[int, list[float]]] = {}
    if is_late:
        meet(path, size, "published")

    def load(name: str, tensor: torch.Tensor) -> None:
        found[name] = file_at(tensor.data_ptr()), tensor.unique().tolist()

    with subscribe(path, load=load) as consumer:
        consumer.receive(DEADLINE_S)
        if not is_late:
            meet(path, size, "published")
        meet(path, size, "through")
    return found


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
def test_where_there_is_an_ipc_buffer_a_consumer_reads_in_that_of_its_device(is_late: bool, tmp_path: Path) -> None:
    first, _second, found = run_ranks(DEVICES + 1, by_way_of_another_buffer, tmp_path, is_late)
    assert found == {f"of rank {rank}": (first, [1.0]) for rank in range(DEVICES)}
