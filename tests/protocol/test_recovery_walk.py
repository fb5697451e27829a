"""The controller's machine on random walks: any report may come next, and ranks are lost at any moment.

A walk draws a job, lets open moves happen in any order and injects faults; then the faults stop and the job runs to its
end. `SimulatedJob` checks every order on the way. A walk that has failed is repeated with its seed.
"""

import random

from tests.protocol.simulated_job import Move, SimulatedJob
from tests.protocol.simulated_worker import SimulatedWorker, WorkerState

from keepstep.protocol.recovery import Stage

NUM_WALKS = 300
FAULT_RATE = 0.03
MAX_MOVES = 20_000
"""A walk takes a few hundred."""


class Walk:
    """One job, one random generator, and the story so far."""

    def __init__(self, seed: int, **settings: object) -> None:
        self.random = random.Random(seed)
        drawn: dict[str, object] = {
            "world_size": self.random.randint(1, 4),
            "num_spares": self.random.randint(0, 3),
            "num_steps": self.random.randint(1, 12),
            "max_restarts": self.random.choice([None, None, 0, 2]),
        }
        self.job = SimulatedJob(**drawn | settings)
        self.num_faults = self.random.randint(1, 4)
        self.story = [f"{self.job.machine.settings}, {self.job.num_steps} steps, seed {seed}"]

    def step(self, *, faults: bool) -> None:
        """One move, or one fault, or the next deadline where nothing else can happen."""
        if faults and self.num_faults and self.job.workers and self.random.random() < FAULT_RATE:
            self.inject()
            return
        moves = [*self.job.moves(training=True, failures=faults), *self.more_moves()]
        if moves:
            what, move = self.random.choice(moves)
            self.story.append(f"{self.job.machine.stage} {self.job.machine.generation}: {what}")
            move()
        else:
            self.story.append(f"{self.job.machine.stage}: nothing is open, the deadline comes")
            self.job.deadline()

    def more_moves(self) -> list[Move]:
        """What else can happen next."""
        return []

    def inject(self) -> None:
        """Loses one worker in one way, unless that way is left out."""
        worker = self.random.choice(list(self.job.workers.values()))
        kind = self.random.choice(["kill", "kill", "hang", "throw"])
        if not worker.hung and self.may_be_lost(worker, kind):
            self.story.append(f"{kind} worker {worker.number}, rank {worker.rank}, {worker.state.name}")
            getattr(self.job, kind)(worker)
            self.num_faults -= 1

    def may_be_lost(self, worker: SimulatedWorker, kind: str) -> bool:
        """Whether this loss is among those that this walk tries."""
        return True

    def run(self) -> None:
        """Walks with faults for a while, then without any to the end, and checks how it ended."""
        for _ in range(self.random.randint(5, 400)):
            if not self.job.ended:
                self.step(faults=True)
        for _ in range(MAX_MOVES):
            if self.job.ended:
                break
            self.step(faults=False)
        self.check_end()

    def told(self) -> str:
        """The settings of the walk, and its end."""
        return "\n  ".join(["the walk:", *self.story[:1], *self.story[-60:]])

    def check_end(self) -> None:
        """The job ended, as it may, and without having waited for a deadline: no process withheld an answer."""
        job = self.job
        assert job.ended is not None, "the job goes on for ever"
        assert job.machine.stage is Stage.ENDED
        assert job.ended.exit_code in (0, 1, 75, 76)
        if job.ended.exit_code == 0:
            ranks = range(job.machine.settings.world_size)
            assert job.machine.digests == dict.fromkeys(ranks, f"weights at step {job.num_steps}")
        assert job.num_deadlines == 0, "a process was waited for until a deadline"


class TrainingWalk(Walk):
    """Only ranks are lost, and only from training on: what is known to fail beside that is tried by other walks."""

    def may_be_lost(self, worker: SimulatedWorker, kind: str) -> bool:
        starting = worker.state in (
            WorkerState.LAUNCHING,
            WorkerState.JOINING,
            WorkerState.CONNECTING,
            WorkerState.BUILDING,
        )
        return not starting and self.job.machine.stage is not Stage.STARTING and worker.rank is not None


class CheckpointWalk(TrainingWalk):
    """Half of the losses are of all ranks at once, so that a checkpoint must be gone back to."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, num_steps=20, checkpoint_every=3, max_restarts=None)
        self.num_faults = 6

    def inject(self) -> None:
        """Loses one rank, or all of them."""
        if self.job.machine.stage is not Stage.TRAINING or self.random.random() < 0.5:
            super().inject()
            return
        self.story.append("kill all ranks")
        for worker in [worker for worker in self.job.workers.values() if worker.rank is not None]:
            self.job.kill(worker)
        self.num_faults -= 1


class NodeWalk(Walk):
    """Whole nodes are lost, with what runs there, and come back; and the controller is restarted."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        num_nodes, slots = draw.randint(2, 4), draw.randint(2, 3)
        num_ranks = draw.randint(1, num_nodes * slots)
        super().__init__(
            seed,
            nodes={f"node-{index}/rack-{index % 2}": slots for index in range(num_nodes)},
            world_size=num_ranks,
            num_spares=draw.randint(0, num_nodes * slots - num_ranks),
            ranks_per_node=draw.choice([None, -(-num_ranks // num_nodes)]),
            checkpoint_every=draw.choice([None, 2]),
            max_restarts=draw.choice([None, None, None, 4]),
        )
        self.num_faults = 8
        self.slots = slots
        self.racks = {name: node.offer.domain for name, node in self.job.nodes.items()}

    def more_moves(self) -> list[Move]:
        """A node that was given up comes back."""
        away = self.racks.keys() - self.job.nodes.keys() - {node.node for node in self.job.dark}
        offer = self.job.offer
        return [
            (f"{name} comes back", lambda name=name: offer(name, self.slots, self.racks[name])) for name in sorted(away)
        ]

    def inject(self) -> None:
        """Loses a node, restarts the controller, or loses one worker."""
        fault = self.random.choice(["node", "node", "controller", "worker"])
        if fault == "worker":
            super().inject()
            return
        if fault == "node" and self.job.nodes:
            name = self.random.choice(sorted(self.job.nodes))
            self.story.append(f"{name} is lost with workers {sorted(self.job.nodes[name].ranks)}")
            self.job.lose_node(name)
        elif fault == "controller":
            self.story.append("the controller is restarted")
            self.job.restart_controller()
        self.num_faults -= 1


def run_all(walks: list[Walk]) -> list[Walk]:
    for walk in walks:
        try:
            walk.run()
        except Exception as error:  # whatever went wrong is told with its story
            error.add_note(walk.told())
            raise
    return walks


def test_losses_from_training_on(seed: int) -> None:
    walks = run_all([TrainingWalk(seed + index) for index in range(NUM_WALKS)])
    recovered = [walk for walk in walks if any(record.resumed_s for record in walk.job.machine.records)]
    superseded = [walk for walk in walks if any(record.superseded for record in walk.job.machine.records)]
    assert len(recovered) > NUM_WALKS / 8, "the walks hardly recover, so they hardly test"
    assert superseded, "no walk loses a rank during a recovery"


def test_losses_of_any_rank_at_any_time(seed: int) -> None:
    run_all([Walk(seed + index) for index in range(NUM_WALKS)])


def test_losses_with_checkpoints(seed: int) -> None:
    walks = run_all([CheckpointWalk(seed + index) for index in range(NUM_WALKS)])
    actions = [record.actions.values() for walk in walks for record in walk.job.machine.records]
    assert any("rewind" in each for each in actions), "no walk goes back to a checkpoint"


def test_losses_of_nodes_and_restarts_of_the_controller(seed: int) -> None:
    walks = run_all([NodeWalk(seed + index) for index in range(NUM_WALKS)])
    causes = {record.cause for walk in walks for record in walk.job.machine.records if record.resumed_s}
    assert {"node lost", "controller restarted"} <= causes, "no walk recovers from that"
    assert any(walk.job.ended.exit_code == 0 and len(walk.job.machine.records) > 1 for walk in walks)


def test_a_walk_is_repeated_by_its_seed() -> None:
    first, second = (TrainingWalk(20261120) for _ in range(2))
    first.run()
    second.run()
    assert first.story == second.story
