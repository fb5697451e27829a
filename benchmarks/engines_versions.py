"""How long a vLLM server takes to a new version: by keepstep, and by a checkpoint on disk that vLLM loads again.

    make test-engines                             makes the environment of the server
    python benchmarks/engines_versions.py         some minutes

Both ways take turns, on one server, with the same weights, and the server's answers are compared with Transformers'.

Prints the table, and writes ``benchmarks/results/DATE-engines-versions.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import page
import torch
from checkout import ROOT
from jobs import JobFailed
from page import RESULTS, Section
from rich.console import Console
from safetensors.torch import save_file
from tests.engines.real.servers import RealServer, vllm_server
from transformers import LlamaConfig, LlamaForCausalLM

import keepstep

KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]
PROMPT, NUM_TOKENS = [5, 3, 8, 1], 8
DEADLINE_S, POLL_S = 120.0, 0.005
QUICK = {"versions": 2, "layers": 2, "width": 64}


def write_model(folder: Path, layers: int, width: int) -> Any:
    """Writes a Llama as a checkpoint, and returns it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=256, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def expected(model: Any) -> list[int]:
    """Returns the likeliest tokens."""
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    answer = model.generate(
        torch.tensor([PROMPT]), attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return answer[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]  # transformers is not typed here


def post(server: RealServer, route: str, content: object = None) -> None:
    """Calls a route of the server."""
    data = None if content is None else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/{route}", data, headers, method="POST")
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        response.read()


def by_keepstep(server: RealServer, publisher: keepstep.Publisher, number: int) -> None:
    """Publishes a version, and waits until the server has it; `keepstep weights load` runs beside it."""
    publisher.publish(number)
    until_s = time.monotonic() + DEADLINE_S
    while server.get("weight_info")["weight_version"] != str(number):
        if time.monotonic() > until_s:
            raise JobFailed(f"the server has not got version {number}")
        time.sleep(POLL_S)


def by_checkpoint(server: RealServer, model: Any, folder: Path) -> None:
    """Writes a checkpoint, and has the server load it while no request runs."""
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
    post(server, "pause?mode=wait")
    post(server, "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    post(server, "reset_prefix_cache")
    post(server, "resume")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Has both ways take turns."""
    torch.set_num_threads(1)
    model = write_model(folder / "model", args.layers, args.width)
    disk = folder / "disk"
    disk.mkdir()
    times: dict[str, list[float]] = {"keepstep": [], "checkpoint": []}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(vllm_server(folder / "model", python=str(args.vllm_python)))
        publisher = stack.enter_context(contextlib.closing(keepstep.Publisher(folder / "w", model, copies=True)))
        log = stack.enter_context((folder / "load.log").open("wb"))
        load = [*KEEPSTEP, "weights", "load", str(folder / "w"), "--vllm", server.url]
        driver = subprocess.Popen(load, stdin=subprocess.DEVNULL, stderr=log)
        stack.callback(driver.wait)
        stack.callback(driver.terminate)
        publisher.wait_for_consumers(1, DEADLINE_S)
        by_keepstep(server, publisher, 1)  # the workers attach
        for number in range(2, 2 + args.versions):
            ways: dict[str, Callable[[], None]] = {
                "keepstep": lambda number=number: by_keepstep(server, publisher, number),
                "checkpoint": lambda: by_checkpoint(server, model, disk),
            }
            for way, change in ways.items():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.abs().mean())
                begun_s = time.monotonic()
                change()
                times[way].append(time.monotonic() - begun_s)
                if server.ask(PROMPT, NUM_TOKENS) != expected(model):
                    raise JobFailed(f"the server does not answer with the new weights: {way}, version {number}")
    num_bytes = sum(each.nbytes for each in model.parameters())
    return {"times": times, "num_bytes": num_bytes}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the table."""
    times = result["times"]
    floor = statistics.median(times["keepstep"])
    names = {"keepstep": "keepstep: publish, until the server has it", "checkpoint": "vLLM: checkpoint on disk, reload"}
    rows = [
        [names[way], f"{statistics.median(found):.2f}", f"{min(found):.2f}", f"{max(found):.2f}",
         f"{statistics.median(found) / floor:.2f}"]
        for way, found in times.items()
    ]  # fmt: skip
    notes = [f"{len(times['keepstep'])} versions each, in turns, of {result['num_bytes'] / 1e6:,.0f} MB (float32)."]
    return [Section("One version, s", ("", "median", "least", "most", "ratio"), rows, notes)]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page."""
    head = page.heading("Versions for vLLM", result) + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Measures, prints the table, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=10, help="for each way (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=768, help="of the model (default: %(default)s)")
    own = ROOT / ".venv-vllm" / "bin" / "python"
    parser.add_argument("--vllm-python", type=Path, default=own, help="vLLM's interpreter (default: %(default)s)")
    parser.add_argument("--results", type=Path, help=f"where the page goes (default: {RESULTS})")
    args = page.parsed(parser, QUICK)
    folder = args.results or (None if args.quick else RESULTS)

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as parent:
            return measure(args, Path(parent))

    known = page.provenance("engines_versions.py")
    return page.carry_out("engines-versions", known, measured, sections, markdown, Console(), folder)


if __name__ == "__main__":
    sys.exit(main())
