"""Reinforcement learning (GRPO): two trainers send their weights to two generators at every step, and any may be lost.

The policy learns to write a row of digits backwards. One command starts the generators and the job, prints the mean
reward, and ends all processes:

    python examples/rl_loop.py

The same under `keepstep drill`: it runs the job twice, and kills trainers in the second run, and generators in both:

    python examples/rl_loop.py --kill

    trainer 0 ─┐  weights of each step, whole   ┌─► generator 0 ─┐
    trainer 1 ─┴────────────────────────────────┴─► generator 1 ─┴── samples ──► trainers

The trainers (FSDP2, each with a shard of its own) request the samples of a step from the generators over a Unix socket.
A sample is a function of (version, prompt, seed): the generator draws it inside `using(version=...)`, so with exactly
this version, and always in a batch of the same shape. So if samples are lost with a generator, the other one draws them
again, and the training is bit for bit the same whichever process is killed.

The generators may be on another machine. Then start each part by hand:

    keepstep token --new --out job.secret                                        # once; copy it to both machines
    keepstep weights serve /tmp/rl/weights --listen trainer:29600 --secret-file job.secret         # on the trainers'
    keepstep run --nproc-per-node 2 examples/rl_loop.py train /tmp/rl --secret-file job.secret \
        --generators generator:7000,generator:7001
    keepstep weights receive /tmp/rl/weights --from trainer:29600 --secret-file job.secret         # on the generators'
    python examples/rl_loop.py generate /tmp/rl 0 --listen generator:7000 --secret-file job.secret
    python examples/rl_loop.py generate /tmp/rl 1 --listen generator:7001 --secret-file job.secret

It needs only torch and keepstep. Shapes: P prompts, G answers to each, B = P * G samples, L digits of a row.
"""

import argparse
import contextlib
import hashlib
import hmac
import json
import multiprocessing
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import keepstep

LENGTH, DIGITS, NOTHING = 4, 10, 10
PROMPTS, GROUP = 16, 16  # per trainer and step: number of prompts, and of answers to each of them
NUM_GENERATORS = 2
DEADLINE_S = 60.0  # for the samples of one step, including lost generators
POLL_S = 0.05
KILLS = {1: "forward", 2: "barrier", 3: "optimizer"}  # quarter of the steps -> phase of the killed trainer
MAX_KILLED, ANSWERS = 20, 10  # at most so many generators; one each time that both have this many answers


class Policy(nn.Module):
    """Computes the logits of the next digit from a prompt and the answer so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, 16)
        self.layers = nn.Sequential(nn.Linear(2 * LENGTH * 16, 128), nn.ReLU(), nn.Linear(128, DIGITS))

    def forward(self, prompt_BL: torch.Tensor, answer_BL: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(torch.cat([prompt_BL, answer_BL], dim=1)).flatten(1))


def prefix(answer_BL: torch.Tensor, position: int) -> torch.Tensor:
    """Returns the answer up to a position, filled up with ``NOTHING``."""
    return torch.where(torch.arange(LENGTH) < position, answer_BL, NOTHING)


# ---- messages between trainers and generators ------------------------------------------------------------------------


class Line:
    """Encodes a message as a line with a MAC. On a network, each side accepts only messages with the job's secret."""

    def __init__(self, secret_file: Path | None) -> None:
        self.secret = b"" if secret_file is None else secret_file.read_bytes()  # a Unix socket needs none

    def of(self, message: dict) -> bytes:
        body = json.dumps(message).encode()
        return b"%s %s\n" % (self._mac(body), body)

    def read(self, line: bytes) -> dict:
        mac, _, body = line.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(mac, self._mac(body)):
            raise ConnectionError("the other side has another secret")
        return json.loads(body)

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self.secret, body, "sha256").hexdigest().encode()


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


# ---- the generators ------------------------------------------------------------------------------------------------


def digest_of(policy: Policy) -> str:
    """Returns a digest of all bits of the weights."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in policy.parameters())).hexdigest()[:16]


@torch.inference_mode()
def draw(policy: Policy, prompt_BL: torch.Tensor, seed: int) -> torch.Tensor:
    """Draws answers [B, L], digit by digit. They depend only on the weights, the prompts and the seed."""
    generator = torch.Generator().manual_seed(seed)
    answer_BL = torch.full_like(prompt_BL, NOTHING)
    for position in range(LENGTH):
        logits = policy(prompt_BL, answer_BL)
        answer_BL[:, position] = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return answer_BL


class Generator(socketserver.ThreadingTCPServer):
    """Answers each request, a line, with a line."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, folder: Path, number: int, listen: str | None, line: Line) -> None:
        self.policy, self.line = Policy(), line
        device = number if listen is None else 0  # on another machine all attach to device 0 of `weights receive`
        self.subscriber = keepstep.Subscriber(folder / "weights", into=self.policy, device=device)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / f"samples-{number}-{os.getpid()}.jsonl").open("a")
        path = folder / f"generator-{number}"
        path.unlink(missing_ok=True)  # of a generator that was killed
        self.address_family = socket.AF_UNIX if listen is None else socket.AF_INET
        super().__init__(str(path) if listen is None else host_and_port(listen), Requests)

    def answer(self, request: dict) -> dict:
        """Returns samples of exactly the requested version, or an error."""
        prompt_BL = torch.tensor(request["prompts"])
        try:
            with self.subscriber.using(1.0, version=request["version"]) as version:
                before = digest_of(self.policy)
                answer_BL = draw(self.policy, prompt_BL, request["seed"])
                sample = {"version": version, "seed": request["seed"], "answers": answer_BL.tolist(), "digest": before}
                assert digest_of(self.policy) == before, "the weights changed while samples were drawn"
        except keepstep.WeightsNotReady as error:
            return {"error": str(error)}
        print(json.dumps(sample), file=self.log, flush=True)
        return sample


class Requests(socketserver.StreamRequestHandler):
    """Handles the requests of one trainer."""

    server: Generator

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the trainer was killed, or uses another generator
            for line in self.rfile:
                self.wfile.write(self.server.line.of(self.server.answer(self.server.line.read(line))))


def generate(folder: Path, number: int, listen: str | None = None, secret_file: Path | None = None) -> None:
    """Runs one generator until SIGTERM."""
    torch.set_num_threads(1)
    with Generator(folder, number, listen, Line(secret_file)) as server, server.subscriber:
        server.subscriber.start()
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        server.serve_forever(POLL_S)


# ---- the trainers --------------------------------------------------------------------------------------------------


class Asked:
    """Requests the samples of one step. If a generator is lost or lacks the version, it asks the next one."""

    def __init__(self, addresses: list[str], line: Line, request: dict) -> None:
        self.request, self._addresses, self._line = request, addresses, line
        self._socket: socket.socket | None = None
        self._received = b""

    def poll(self) -> dict | None:
        """Waits `POLL_S` for the answer. Returns None if it is not there yet."""
        try:
            if self._socket is None:
                self._socket, self._received = connected(self._addresses[0]), b""
                self._socket.sendall(self._line.of(self.request))
            if select.select([self._socket], [], [], POLL_S)[0]:
                self._received += self._read()
            if not self._received.endswith(b"\n"):
                return None
            answer = self._line.read(self._received)
            if "error" not in answer:
                self.close()
                return answer
        except OSError:  # the generator was killed, or has not started yet
            time.sleep(POLL_S)
        self.close()
        self._addresses = [*self._addresses[1:], self._addresses[0]]
        return None

    def _read(self) -> bytes:
        assert self._socket is not None
        if received := self._socket.recv(1 << 20):
            return received
        raise ConnectionError("the generator is gone")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connected(address: str) -> socket.socket:
    """Connects to a generator: HOST:PORT on another machine, or the path of a Unix socket."""
    if ":" in address:
        return socket.create_connection(host_and_port(address), timeout=1.0)
    found = socket.socket(socket.AF_UNIX)
    found.connect(address)
    return found


def samples_of(asked: Asked) -> torch.Tensor:
    """Waits until all trainers have their samples, and returns the answers [B, L].

    All trainers repeatedly reduce how many have them. With these collectives keepstep sees that a waiting trainer does
    not hang, and the wait ends when a trainer is lost. A collective that a failure interrupts counts this rank alone.
    """
    sample, until_s = None, time.monotonic() + DEADLINE_S
    while True:
        sample = sample or asked.poll()
        counts = torch.tensor([sample is not None, 1])
        dist.all_reduce(counts)
        num_ready, num_ranks = counts.tolist()
        if num_ranks < dist.get_world_size():
            raise ConnectionError("another trainer was lost while samples were drawn")  # the step is repeated
        if num_ready == num_ranks:
            assert sample["version"] == asked.request["version"], sample
            return torch.tensor(sample["answers"])
        if time.monotonic() > until_s:
            raise TimeoutError(f"no samples of version {asked.request['version']} within {DEADLINE_S:g} s")


def advantages(reward_BL: torch.Tensor) -> torch.Tensor:
    """Returns how much better each digit is than those of its group, the answers to the same prompt (GRPO)."""
    reward_PGL = reward_BL.view(PROMPTS, GROUP, LENGTH)
    centred_PGL = reward_PGL - reward_PGL.mean(1, keepdim=True)
    return (centred_PGL / (reward_PGL.std(1, keepdim=True) + 1e-4)).view(-1, LENGTH)


def loss_of(policy: nn.Module, prompt_BL: torch.Tensor, answer_BL: torch.Tensor, advantage_BL: torch.Tensor):
    """Returns the REINFORCE loss: the negative log-likelihood of each digit, weighted by its advantage."""
    prefixes = torch.cat([prefix(answer_BL, position) for position in range(LENGTH)])
    logits = policy(prompt_BL.repeat(LENGTH, 1), prefixes)
    surprise = F.cross_entropy(logits, answer_BL.T.flatten(), reduction="none").view(LENGTH, -1).T
    return (advantage_BL * surprise).sum(1).mean()


def train(folder: Path, num_steps: int, generators: str | None = None, secret_file: Path | None = None) -> None:
    """Runs one trainer."""
    paths = [str(folder / f"generator-{number}") for number in range(NUM_GENERATORS)]
    addresses, line = generators.split(",") if generators else paths, Line(secret_file)
    session = keepstep.init(seed=0)
    torch.manual_seed(0)
    policy = Policy()
    dist.barrier()  # a spare waits here for its rank, with the model built
    fully_shard(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session.protect(model=policy, optimizer=optimizer, snapshot_every=2)
    state = session.state(rewards=[])
    session.publish_weights(folder / "weights", policy, every=1, at_start=True)
    for step in session.steps(num_steps):
        with step:
            rank, seed = session.data_rank, step.index * session.data_world_size + session.data_rank
            prompt_BL = torch.randint(DIGITS, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(seed))
            prompt_BL = prompt_BL.repeat_interleave(GROUP, dim=0)
            request = {"version": step.index, "prompts": prompt_BL.tolist(), "seed": seed}
            first = rank % len(addresses)
            with contextlib.closing(Asked(addresses[first:] + addresses[:first], line, request)) as asked:
                answer_BL = samples_of(asked)
            reward_BL = (answer_BL == prompt_BL.flip(1)).float()
            mean_reward = reward_BL.mean()
            dist.all_reduce(mean_reward)  # values in session.state() must be equal on all ranks
            optimizer.zero_grad()
            loss_of(policy, prompt_BL, answer_BL, advantages(reward_BL)).backward()
            optimizer.step()
            state.rewards = [*state.rewards[-19:], float(mean_reward) / dist.get_world_size()]
        if session.rank == 0 and (step.index + 1) % 20 == 0:
            print(f"step {step.index + 1}: mean reward {sum(state.rewards) / 20:.2f}", flush=True)


# ---- everything at once --------------------------------------------------------------------------------------------


class Generators:
    """The processes of the generators, forked from this one, which has imported torch and computes nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_killed = folder, 0
        self.processes = [self._start(number) for number in range(NUM_GENERATORS)]

    def _start(self, number: int) -> ForkProcess:
        process = multiprocessing.get_context("fork").Process(target=generate, args=(self.folder, number))
        process.start()
        return process

    def look_after(self, kills: bool) -> None:
        """Restarts each process that has ended. With ``kills``, kills one when both have given enough answers."""
        if (
            kills
            and self.num_killed < MAX_KILLED
            and all(self._num_answers(each) >= ANSWERS for each in self.processes)
        ):
            self.processes[self.num_killed % NUM_GENERATORS].kill()  # SIGKILL, at any point
            self.num_killed += 1
        for number, process in enumerate(self.processes):
            if select.select([process.sentinel], [], [], POLL_S)[0]:
                self.processes[number] = self._start(number)

    def _num_answers(self, process: ForkProcess) -> int:
        return sum(path.read_text().count("\n") for path in self.folder.glob(f"samples-*-{process.pid}.jsonl"))

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def orchestrate(folder: Path, num_steps: int, kills: bool) -> int:
    """Runs generators and trainers to their end. Returns the job's exit code."""
    faults = [f"kill@step={num_steps * n // 4 + n},phase={phase},rank={n % 2}" for n, phase in KILLS.items()]
    command = ["drill", "--faults", ";".join(faults)] if kills else ["run"]
    flags = ["--nproc-per-node", "2", "--spares", "1"]
    script = [__file__, "train", str(folder), "--steps", str(num_steps)]
    generators = Generators(folder)
    try:
        job = subprocess.Popen([sys.executable, "-m", "keepstep.cli.main", *command, *flags, *script])
        while job.poll() is None:
            generators.look_after(kills)
    finally:
        generators.end()
    print(f"generators killed: {generators.num_killed}")
    return job.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a policy on samples that other processes draw.")
    parser.add_argument("part", nargs="?", choices=["all", "generate", "train"], default="all")
    parser.add_argument("folder", nargs="?", type=Path, help="where they find each other (default: a temporary one)")
    parser.add_argument("number", nargs="?", type=int, help="of this generator")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--listen", metavar="HOST:PORT", help="of this generator, on another machine than the trainers")
    parser.add_argument("--generators", metavar="HOST:PORT,...", help="where they are (default: on this machine)")
    parser.add_argument("--secret-file", type=Path, help="that of 'keepstep token', for --listen and --generators")
    parser.add_argument("--kill", action="store_true", help="a drill: trainers and generators are killed")
    args = parser.parse_args()
    if (args.listen or args.generators) and not args.secret_file:
        parser.error("generators on another machine need --secret-file")
    match args.part:
        case "generate":
            generate(args.folder, args.number, args.listen, args.secret_file)
        case "train":
            train(args.folder, args.steps, args.generators, args.secret_file)
        case _:
            with contextlib.ExitStack() as stack:
                folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-")))
                return orchestrate(folder, args.steps, args.kill)
    return 0


if __name__ == "__main__":
    sys.exit(main())
