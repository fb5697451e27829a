"""Generate text with the GPT of train_gpt.py while it trains, over HTTP, always with the newest weights.

Train, and publish the weights in a folder (kill one of the workers while it runs):

    keepstep run --nproc-per-node 3 --spares 1 examples/train_gpt.py --steps 5000 --publish /tmp/gpt

Serve. Start the two commands in any order; the shape (--size, --layers, ...) must be the same:

    python examples/serve_gpt.py /tmp/gpt --port 8000

Ask:

    curl 'http://127.0.0.1:8000/generate?prompt=import&bytes=80&temperature=0.5'
    curl 'http://127.0.0.1:8000/health'

Each answer contains the version of the weights that has generated it: the number of steps trained. One version
generates the whole answer. While ranks are lost, and while no job runs at all, the server answers with the last version
that it has; before it has any, the answer is 503.

It needs only torch and keepstep. The lines for keepstep are the subscriber in `main`, and
`with subscriber.using() as version:` around each use of the weights.
"""

import argparse
import contextlib
import json
import os
import signal
import threading
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import torch
import xxhash
from train_gpt import GPT, SIZES, GPTConfig, build_model

import keepstep

DEFAULTS = {"prompt": "import ", "bytes": "40", "temperature": "0"}
MAX_PROMPT_BYTES = 1000
MAX_BYTES = 1000


class BadRequest(ValueError):
    """The request is invalid. The message says what is allowed."""


def generate(gpt: GPT, prompt: bytes, num_bytes: int, temperature: float) -> bytes:
    """Returns the bytes that follow the prompt.

    Args:
        gpt: the model. It sees the last ``context`` bytes only.
        prompt: at least one byte.
        num_bytes: how many bytes to generate.
        temperature: of the sampling; 0: always the most likely byte.
    """
    context = gpt.position.num_embeddings
    text = list(prompt)
    for _ in range(num_bytes):
        logits_V = gpt.logits(torch.tensor([text[-context:]]))[0, -1]
        if temperature == 0:
            text.append(int(logits_V.argmax()))
        else:
            text.append(int(torch.multinomial(torch.softmax(logits_V / temperature, dim=0), 1)))
    return bytes(text[len(prompt) :])


def digest_of(gpt: GPT) -> str:
    """Returns a digest of all bits of the weights."""
    digest = xxhash.xxh3_64()  # keepstep's own checksum, installed with it
    for parameter in gpt.parameters():
        digest.update(parameter.detach().numpy().data)
    return digest.hexdigest()


def parse_question(query: str) -> tuple[bytes, int, float]:
    """Returns prompt, number of bytes and temperature of a query string.

    Raises:
        BadRequest: a value is unknown or not allowed.
    """
    given = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := given.keys() - DEFAULTS.keys():
        raise BadRequest(f"unknown: {', '.join(sorted(unknown))}; allowed are {', '.join(DEFAULTS)}")
    values = DEFAULTS | given
    prompt = values["prompt"].encode()
    if not 1 <= len(prompt) <= MAX_PROMPT_BYTES:
        raise BadRequest(f"a prompt of {len(prompt)} bytes; allowed are 1 to {MAX_PROMPT_BYTES}")
    try:
        num_bytes, temperature = int(values["bytes"]), float(values["temperature"])
    except ValueError as error:
        raise BadRequest(f"bytes and temperature must be numbers: {error}") from None
    if not 1 <= num_bytes <= MAX_BYTES:
        raise BadRequest(f"bytes={num_bytes}; allowed are 1 to {MAX_BYTES}")
    if not (temperature == 0 or 0.01 <= temperature <= 100):  # NaN is neither
        raise BadRequest(f"temperature={temperature}; allowed are 0 and 0.01 to 100")
    return prompt, num_bytes, temperature


class TextServer(ThreadingHTTPServer):
    """Answers each request in a separate thread. Listens on the loopback interface only."""

    daemon_threads = False  # so that server_close() waits for unfinished answers
    request_queue_size = 128

    def __init__(self, port: int, gpt: GPT, subscriber: keepstep.Subscriber) -> None:
        super().__init__(("127.0.0.1", port), Request)
        self.gpt = gpt
        self.subscriber = subscriber

    def answer(self, path: str, query: str) -> tuple[HTTPStatus, dict[str, object]]:
        """Returns status and content of the answer to a GET request."""
        try:
            match path:
                case "/generate":
                    return HTTPStatus.OK, self.text(*parse_question(query))
                case "/health":
                    return HTTPStatus.OK, self.health()
                case _:
                    return HTTPStatus.NOT_FOUND, {"error": f"there is no {path}; there are /generate and /health"}
        except BadRequest as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except keepstep.WeightsNotReady as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}

    def text(self, prompt: bytes, num_bytes: int, temperature: float) -> dict[str, object]:
        """Generates text with one version of the weights. A newer version waits until the ``with`` block ends."""
        with self.subscriber.using() as version, torch.inference_mode():
            text = generate(self.gpt, prompt, num_bytes, temperature)
            return {"version": version, "text": text.decode(errors="replace"), "digest": digest_of(self.gpt)}

    def health(self) -> dict[str, object]:
        """Returns the state of the weights, and the error if the latest version failed to arrive."""
        error = self.subscriber.last_error
        return {
            "version": self.subscriber.version,
            "condition": self.subscriber.condition,
            "attached": self.subscriber.is_attached,
            "last_error": None if error is None else str(error),
        }


class Request(BaseHTTPRequestHandler):
    """Handles one request. The answer is JSON."""

    server: TextServer
    timeout = 10  # seconds, for a client that sends nothing

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        status, content = self.server.answer(url.path, url.query)
        body = json.dumps(content).encode() + b"\n"
        with contextlib.suppress(ConnectionError):  # the client has left
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppresses the log line of each request."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate text with a GPT that is being trained.")
    parser.add_argument("folder", type=Path, help="the one that train_gpt.py has after --publish")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small", help="a shape; the next flags change it")
    for name in ("layers", "width", "heads", "context"):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()
    shape = {name: value for name, value in vars(args).items() if name in GPTConfig.__dataclass_fields__ and value}
    args.config = replace(SIZES[args.size], **shape)
    if args.config.width % args.config.heads:
        parser.error(f"--width {args.config.width} must be a multiple of --heads {args.config.heads}")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # requests run in parallel threads, and the training needs cores, too
    gpt = build_model(args.config).eval()
    subscriber = keepstep.Subscriber(args.folder, into=gpt, name=f"serve_gpt.py, process {os.getpid()}")
    with subscriber, TextServer(args.port, gpt, subscriber) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            # In a thread, because shutdown() waits for serve_forever(), which the signal has interrupted, to return.
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        subscriber.start()
        print(f"serving http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
