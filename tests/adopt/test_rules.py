"""Each rule, firing and not: one change to a script that is fine, or to a plain one."""

from __future__ import annotations

import pytest
from tests.adopt.shapes import ADOPTED, PLAIN, changed, findings, said

START, FRONT, LOOP = "# start", "# before the loop", "for step, (x, y) in session.batches(loader, epochs=3):"
BEHIND = "# after the update"

FIRES: list[tuple[str, str, str, str]] = [
    # ---- ranks and devices
    (START, "rank = dist.get_rank()", "rank = dist.get_rank()", "rank = session.rank, inside of the loop"),
    (
        START,
        'rank = int(os.environ["RANK"])',
        'rank = int(os.environ["RANK"])',
        "rank = session.rank, inside of the loop",
    ),
    (
        START,
        "torch.manual_seed(session.rank)",
        "torch.manual_seed(session.rank)",
        "session.rank, inside of the loop",
    ),
    (START, "if dist.get_rank() == 0: print()", "if dist.get_rank() == 0: print()", "if session.is_main:"),
    (START, 'ddp = "RANK" in os.environ', 'ddp = "RANK" in os.environ', "ddp = session.world_size > 1"),
    (START, 'ddp = os.getenv("RANK") != None', 'ddp = os.getenv("RANK") != None', "ddp = session.world_size > 1"),
    (
        START,
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        "torch.cuda.set_device(session.device)",
    ),
    (
        "sampler=DistributedSampler(dataset))",
        "sampler=DistributedSampler(dataset, num_replicas=2, rank=args.rank, seed=1))",
        "loader = DataLoader(dataset, batch_size=8, "
        "sampler=DistributedSampler(dataset, num_replicas=2, rank=args.rank, seed=1))",
        "loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, seed=1))",
    ),
    # ---- what happens once
    (
        START,
        'log = open("log.txt", "w")',
        'log = open("log.txt", "w")',
        'if session.once("log"):\n    log = open("log.txt", "w")',
    ),
    (
        START,
        'Path("a").write_text("")',
        'Path("a").write_text("")',
        'if session.once("log"):\n    Path("a").write_text("")',
    ),
    (START, 'shutil.rmtree("out")', 'shutil.rmtree("out")', 'if session.once("clean"):\n    shutil.rmtree("out")'),
    (
        START,
        "writer = SummaryWriter()",
        "writer = SummaryWriter()",
        "into the loop, after the update: `if session.rank == 0 and writer is None:`",
    ),
    # ---- what is refused
    (
        "model = DDP(torch.nn.Linear(8, 1))",
        "model = DDP(torch.nn.Linear(8, 1), static_graph=True)",
        "model = DDP(torch.nn.Linear(8, 1), static_graph=True)",
        "model = DDP(torch.nn.Linear(8, 1))",
    ),
    (
        "model = DDP(torch.nn.Linear(8, 1))",
        "model = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=True)",
        "model = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=True)",
        "model = DDP(net, find_unused_parameters=True)",
    ),
    (
        "model = DDP(torch.nn.Linear(8, 1))",
        "model = torch.distributed.fsdp.FullyShardedDataParallel(net)",
        "model = torch.distributed.fsdp.FullyShardedDataParallel(net)",
        "model = fully_shard(net)",
    ),
    (
        "torch.optim.SGD(",
        "torch.optim.LBFGS(",
        "optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)",
    ),
    # ---- steps
    (
        "        optimizer.step()",
        "        optimizer.step(closure)",
        "optimizer.step(closure)",
        "closure()\noptimizer.step()",
    ),
    (START, "optimizer.step()", "optimizer.step()", "into a step of the loop in line 20"),
    ("# after the loop", "optimizer.step()", "optimizer.step()", "into a step of the loop in line 20"),
    (
        BEHIND,
        "model(x).mean().backward()\noptimizer.step()",
        "model(x).mean().backward()",
        "into a step of its own: `if step.index % 2 == 0:` for the first update, `else:` for the second",
    ),
    ("    with step:", "    if True:", LOOP, "    with step:"),
    # ---- collectives after the update
    (
        BEHIND,
        "mean = loss.detach()\ndist.all_reduce(mean)\nplateau.step(mean.item())",
        "dist.all_reduce(mean)",
        "before line 26, or before `with step:`",
    ),
    (
        BEHIND,
        "mean = loss.detach()\ndist.all_reduce(mean)\nif mean.item() < 1: print()",
        "dist.all_reduce(mean)",
        "before line 26, or before `with step:`",
    ),
    (
        BEHIND,
        "def reduced(value):\n    dist.reduce(value, 0)\n    return value / 2\n"
        "mean = reduced(loss)\nis_best = mean > 3",
        "mean = reduced(loss)",
        "before line 26, or before `with step:`",
    ),
]


@pytest.mark.parametrize(("place", "lines", "source", "instead"), FIRES)
def test_a_line_to_change_is_found(place: str, lines: str, source: str, instead: str) -> None:
    found = said(changed(ADOPTED, (place, lines)))
    assert [(at, to) for at, _edit, to in found] == [(source, instead)]


SILENT: list[tuple[str, str]] = [
    (START, "size = dist.get_world_size()"),
    (START, 'size = int(os.environ["WORLD_SIZE"])'),
    (START, "is_main = session.is_main"),
    (START, "torch.cuda.set_device(session.device)"),
    (START, "def rank():\n    return dist.get_rank()"),  # never called
    ("# before the step", "rank = dist.get_rank()"),
    (BEHIND, 'rank = int(os.environ["RANK"])'),
    ("# after the loop", "if session.rank == 0: torch.save(model, 'a')"),
    ("sampler=DistributedSampler(dataset))", "sampler=DistributedSampler(dataset, shuffle=False))"),
    ("sampler=DistributedSampler(dataset))", "sampler=DistributedSampler(dataset, 2, session.data_rank))"),
    (START, 'log = open("log.txt")'),
    (START, 'log = open("log.txt", "a")'),
    (START, 'os.makedirs("out", exist_ok=True)'),
    (START, 'if session.once("log"):\n    Path("log.txt").write_text("")'),
    (START, 'with session.once("log") as mine:\n    if mine:\n        shutil.rmtree("out")'),
    (START, 'def clean():\n    shutil.rmtree("out")\nif session.once("log"):\n    clean()'),
    ("# after the loop", 'Path("out.txt").write_text("")'),
    ("model = DDP(torch.nn.Linear(8, 1))", "model = DDP(net, find_unused_parameters=True)"),
    ("model = DDP(torch.nn.Linear(8, 1))", "model = DDP(net, static_graph=False)"),
    (BEHIND, "plateau.step(loss.item())"),
    (BEHIND, "other.step()"),
    (BEHIND, "second = torch.optim.SGD(model.parameters())\nsecond.step()"),  # several updates, all backwards before
    (BEHIND, "model(x).mean().backward()"),  # refused only where an update follows
    (BEHIND, "mean = loss.detach()\ndist.all_reduce(mean)\nprint(mean.item())"),
    (BEHIND, "mean = loss.detach()\ndist.all_reduce(mean)\nif mean is not None: print()"),
    (BEHIND, "dist.barrier()"),
    ("# before the update", "dist.all_reduce(loss)\nplateau.step(loss.item())"),
    ("# before the step", "dist.all_reduce(loss)\nif loss < 3: print()"),
    (START, "count = 0"),  # never changed
    (START, "state = session.state(best=0.0)"),
    (FRONT, "weights = torch.load('weights.pt')\nmodel.load_state_dict(weights)"),  # no step to go on from
]


@pytest.mark.parametrize(("place", "lines"), SILENT)
def test_a_line_that_is_fine_is_not(place: str, lines: str) -> None:
    assert said(changed(ADOPTED, (place, lines))) == []


# ---- updates in branches --------------------------------------------------------------------------------------------


def test_updates_in_two_branches_are_one() -> None:
    both = "loss.backward()\noptimizer.step()"
    loop = (
        "        loss.backward()\n        # before the update\n        optimizer.step()",
        "        if half:\n            loss.backward()\n            optimizer.step()\n        else:\n"
        "            loss.backward()\n            optimizer.step()",
    )
    text = ADOPTED.replace(*loop)
    assert text != ADOPTED
    assert both.splitlines()[0] in text
    assert said(text) == []


@pytest.mark.parametrize(("last", "num"), [("continue", 0), ("pass", 1)])
def test_what_stands_behind_a_continue_is_another_pass(last: str, num: int) -> None:
    early = f"if half:\n    optimizer.step()\n    {last}\nloss.backward()"
    found = findings(changed(ADOPTED, ("loss.backward()", early)))
    assert [finding.source for finding in found] == ["loss.backward()"] * num


EPOCHS = """\
def train_step(step, batch):
    loss = model(batch[0]).mean()
    loss.backward()
    optimizer.step()
    # after the update
for epoch in session.epochs(loader, 3):
    epoch.run(train_step)
    # after the epoch
"""
INNER = """\
for epoch in session.epochs(loader, 3):
    for step, batch in epoch:
        with step:
            loss = model(batch[0]).mean()
            loss.backward()
            optimizer.step()
            # after the update
    # after the epoch
"""


@pytest.mark.parametrize("loop", [EPOCHS, INNER], ids=["run", "with"])
def test_the_end_of_an_epoch_is_protected_like_a_step(loop: str) -> None:
    script = ADOPTED.split("# before the loop")[0] + loop
    decides = "dist.all_reduce(loss)\nif loss < 3: print()"
    assert said(script) == []
    assert said(changed(script, ("# after the epoch", decides))) == []
    found = [source for source, _edit, _instead in said(changed(script, ("# after the update", decides)))]
    assert found == ["dist.all_reduce(loss)"]


# ---- values of the script -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "change", "instead"),
    [
        ('best = float("inf")', "best = min(best, loss.item())", 'state = session.state(best=float("inf"))'),
        ("best = math.inf", "if loss < best: best = loss", "state = session.state(best=math.inf)"),
        ("num_bad = 0", "if bad: num_bad += 1", "state = session.state(num_bad=0)"),
        ("total = 0.0", "total += loss.item()", "own = session.state(per_rank=True, total=0.0)"),
    ],
)
def test_values_that_a_replacement_must_know(first: str, change: str, instead: str) -> None:
    assert said(changed(ADOPTED, (FRONT, first), (BEHIND, change))) == [(first, "replace", instead)]


def test_values_are_declared_together() -> None:
    text = changed(ADOPTED, (FRONT, "best = 0\nbad = 0"), (BEHIND, "best = max(best, 1)\nif loss: bad += 1"))
    assert [instead for _source, _edit, instead in said(text)] == [
        "state = session.state(best=0, bad=0)",
        "state.bad, in the same state()",
    ]


def test_a_counter_of_steps_is_the_steps_own_number() -> None:
    text = changed(ADOPTED, (FRONT, "num_steps = 0"), ("    # after the step", "    num_steps += 1"))
    assert said(text) == [("num_steps += 1", "remove", "")]


def test_a_counter_in_epochs_is_computed() -> None:
    text = in_epochs("for epoch in range(3):", changed(PLAIN, (FRONT, "num = 0"), (BEHIND, "num += 1")))
    assert ("num += 1", "replace", "num = step.epoch * len(loader) + step.position + 1") in said(text)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ("t0 = time.time()", "t0 = time.time()"),
        ("mean = -1.0", "mean = 0.9 * mean + 0.1"),  # of this rank, and for the eye
        ("def f():\n    total = 0", "total += 1"),  # another variable
        ("best = 0", "print(best)"),
    ],
)
def test_values_that_are_the_processs_own(first: str, change: str) -> None:
    assert said(changed(ADOPTED, (FRONT, first), (BEHIND, change))) == []


def test_a_value_that_begins_before_the_job_is_joined() -> None:
    text = changed(PLAIN, ("import torch.distributed as dist", "import torch.distributed as dist\nbest = 0"))
    text = changed(text, (BEHIND, "best = max(best, 1)"))
    assert ("best = 0", "move", "after keepstep.init(): state = session.state(best=0)") in said(text)


# ---- a plain script -------------------------------------------------------------------------------------------------


def loops(script: str) -> list[str]:
    """What is to be written in place of the loops, and what is to be removed."""
    return [
        each.instead or f"remove {each.source}"
        for each in findings(script)
        if "keepstep" not in each.instead and "protect" not in each.instead
    ]


LINE = "for i, (x, y) in enumerate(loader):"


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("for x, y in loader:", "for step, (x, y) in session.batches(loader):\n    with step:"),
        ("for batch in tqdm(loader, disable=True):", "for step, batch in session.batches(loader):\n    with step:"),
        ("for i, batch in enumerate(tqdm(loader), 1):", "for step, batch in session.batches(loader):\n    with step:"),
        ("for i in range(100):", "for step in session.steps(100):\n    with step:"),
        ("for i in range(first, 100):", "for step in session.steps(100, start=first):\n    with step:"),
        ("while i < 100:", "for step in session.steps(100):\n    with step:"),
        ("while i <= 100:", "for step in session.steps(100 + 1):\n    with step:"),
        ("while True:", "for step in session.steps(num_steps):\n    with step:"),
        ("for x, y in windows():", "for step in session.steps(num_steps):\n    with step:"),
    ],
)
def test_loops(line: str, instead: str) -> None:
    assert loops(changed(PLAIN, (LINE, line))) == [instead]


def in_epochs(line: str, script: str = PLAIN) -> str:
    """A script with a loop around its loop."""
    head, inner = script.split("for i, ", 1)
    return head + line + "\n" + "".join(f"    {each}\n" for each in f"for i, {inner}".splitlines())


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("for epoch in range(90):", "for epoch in session.epochs(loader, 90):"),
        ("for epoch in range(1, args.epochs + 1):", "for epoch in session.epochs(loader, args.epochs):"),
        ("for epoch in trange(3):", "for epoch in session.epochs(loader, 3):"),
        ("for _ in range(3):", "for epoch in session.epochs(loader, 3):"),
    ],
)
def test_epochs(line: str, instead: str) -> None:
    assert loops(in_epochs(line)) == [instead, "for step, (x, y) in epoch:\n    with step:"]


def test_epochs_without_an_end() -> None:
    assert loops(in_epochs("while True:")) == [
        "remove while True:",
        "for step, (x, y) in session.batches(loader, epochs=num_epochs):\n    with step:",
    ]


def test_epochs_of_counted_steps() -> None:
    text = in_epochs("for epoch in range(3):").replace("in enumerate(loader)", "in range(n + 1)")
    assert loops(text.replace("i, (x, y)", "i")) == [
        "remove for epoch in range(3):",
        "for step in session.steps(3 * (n + 1)):\n    with step:",
    ]


def test_epochs_in_functions() -> None:
    text = PLAIN.replace(
        "for i, (x, y) in enumerate(loader):", "def one_epoch(batches):\n  for i, (x, y) in enumerate(batches):"
    )
    text = text.replace("\n    ", "\n      ").replace("def one_epoch(batches)", "def one_epoch(batches: DataLoader)")
    text += "def main():\n    for epoch in range(3):\n        one_epoch(loader)\nmain()\n"
    assert loops(text) == [
        "for step, (x, y) in epoch:\n    with step:",
        "for epoch in session.epochs(loader, 3):",
    ]


@pytest.mark.parametrize("sampler", ["loader.sampler", "sampler"])
def test_the_sampler_is_told_of_the_epoch(sampler: str) -> None:
    text = in_epochs("for epoch in range(3):").replace("    for i,", f"    {sampler}.set_epoch(epoch)\n    for i,")
    assert f"remove {sampler}.set_epoch(epoch)" in loops(text)


def test_gradients_that_are_accumulated() -> None:
    text = changed(PLAIN, ("    optimizer.step()", "    if (i + 1) % 4 == 0:\n    optimizer.step()"))
    assert loops(text) == [
        "for step, batches in session.batches(loader, accumulate=4):\n    with step:\n        for (x, y) in batches:",
        "after the loop over the micro-batches of the step, without the condition",
    ]


def test_a_condition_of_something_else_accumulates_nothing() -> None:
    text = changed(PLAIN, ("    optimizer.step()", "    if loss.isfinite():\n    optimizer.step()"))
    assert loops(text) == ["for step, (x, y) in session.batches(loader):\n    with step:"]


def test_two_updates_for_each_batch() -> None:
    text = changed(PLAIN, (BEHIND, "model(x).backward()\noptimizer.step()"))
    assert loops(text) == [
        "for step in session.steps(2 * len(loader)):\n    with step:",
        "into a step of its own: `if step.index % 2 == 0:` for the first update, `else:` for the second",
    ]


def test_a_batch_for_the_next_pass() -> None:
    text = changed(
        PLAIN,
        (LINE, "for i in range(9):"),
        ("# before the loop", "x, y = get_batch()"),
        (BEHIND, "x, y = get_batch()"),
    )
    assert loops(text)[1:] == ["to the beginning of the step, and into each of its micro-batches"]
    text = changed(PLAIN, (LINE, "for i in range(9):"), (BEHIND, "x, y = get_batch()"))
    assert len(loops(text)) == 1


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("for i in range(first, 9):", "session.steps(..., start=first) in line 13"),
        ("for i in range(9):", ""),  # a step that no process goes on from
        ("for step in session.steps(9, start=first):", ""),
    ],
)
def test_a_checkpoint_of_the_scripts_own(line: str, instead: str) -> None:
    load = "saved = torch.load('a')\nmodel.load_state_dict(saved['model']); first = saved['step'] + 1"
    found = said(changed(PLAIN, (LINE, line), ("# before the loop", load)))
    assert [to for source, _edit, to in found if "saved['step']" in source] == [instead] * bool(instead)


def test_init_is_asked_for_once() -> None:
    text = PLAIN.replace('dist.init_process_group("gloo")', "import keepstep\nsession = keepstep.init()")
    assert all("keepstep" not in instead for _source, _edit, instead in said(text))
    alone = PLAIN.replace('dist.init_process_group("gloo")\n', "")
    assert ("model = DDP(torch.nn.Linear(8, 1))", "insert before", "session = keepstep.init(seed=0)") in said(alone)


def test_a_condition_on_torchrun_goes() -> None:
    text = 'if "RANK" in os.environ:\n    dist.init_process_group("gloo")'
    found = said(PLAIN.replace('dist.init_process_group("gloo")', text).replace("import torch\n", "import os, torch\n"))
    assert ('if "RANK" in os.environ:', "remove", "") in found
    assert ('dist.init_process_group("gloo")', "replace", "session = keepstep.init(seed=0)") in found


@pytest.mark.parametrize(("seed", "given"), [("3", "3"), ("args.seed", "0")])
def test_the_seed_is_the_scripts(seed: str, given: str) -> None:
    found = said(PLAIN.replace("model =", f"torch.manual_seed({seed})\nmodel ="))
    assert f"session = keepstep.init(seed={given})" in [instead for _source, _edit, instead in found]


@pytest.mark.parametrize(
    ("lines", "given"),
    [
        ("scaler = torch.amp.GradScaler()", "model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler"),
        ("opt = parse_args()", "model=model, optimizer=optimizer, scheduler=scheduler"),
        (
            "average = torch.optim.swa_utils.AveragedModel(model)",
            "model=model, optimizer=optimizer, scheduler=scheduler, ema=average",
        ),
        (
            "second = torch.optim.Adam(model.parameters())",
            "model=model, optimizer=optimizer, second=second, scheduler=scheduler",
        ),
        (
            "for layer in model.layers:\n    torch.distributed.fsdp.fully_shard(layer)",
            "model=model, optimizer=optimizer, scheduler=scheduler",
        ),
    ],
)
def test_what_is_protected(lines: str, given: str) -> None:
    found = [instead for _source, _edit, instead in said(changed(PLAIN, ("# before the loop", lines)))]
    assert f"session.protect({given})" in found


def test_an_iterable_dataset() -> None:
    stream = "class Stream(torch.utils.data.IterableDataset): ...\nloader = DataLoader(Stream())"
    found = said(changed(PLAIN, ("# before the loop", stream)))
    assert "loader = StatefulDataLoader(Stream())" in [instead for _source, _edit, instead in found]
    for fine in (stream.replace("Iterable", ""), stream.replace("...", "\n    def state_dict(self): ...")):
        found = said(changed(PLAIN, ("# before the loop", fine)))
        assert "Stateful" not in "".join(instead for _source, _edit, instead in found)
