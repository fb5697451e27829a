"""An SGLang server. It loads versions from files in shared memory, which nothing pickles.

SGLang has no route that lets running requests end while new ones wait. `SGLangServer` makes one of three: each call of
``/end_weight_update`` takes the lock for writers, which it gets when no request runs, and new requests wait as long as
another call does; ``/pause_generation`` stops the scheduler; and while that is stopped, ``/flush_cache`` succeeds only
if nothing was running. Facts of SGLang 0.5.23, from its source and from experiments.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keepstep.engines.names import plain_names
from keepstep.engines.server import ANSWER_S, RELEASE_S, SHORT_S, NewVersion, Running, Server
from keepstep.errors import ConfigurationError, KeepstepError, LoadError

NUM_CALLS = 8
"""How many calls wait for the lock at a time, so that one always does."""
NUM_DRAINED = 3
"""So many of them have been answered before the scheduler is stopped: it then has removed completed requests."""
NO_SESSION = "no weight-update session is open"
"""What SGLang answers to ``/end_weight_update`` after it had the lock."""
NOT_FLUSHED = "cache was not flushed"
FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
"""Floating dtypes in the header of a safetensors file."""


class SGLangServer(Server):
    """A server whose scheduler can be stopped: one pipeline stage, one data-parallel rank, one tokenizer."""

    kind = "sglang"
    reads_files = True

    def __init__(
        self,
        url: str,
        *,
        running: Running = Running.DRAIN,
        api_key: str | None = None,
        admin_key: str | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """As for `Server`.

        Args:
            admin_key: the server's ``--admin-api-key``, if it has one.
        """
        super().__init__(url, running=running, api_key=api_key, answer_s=answer_s)
        self._admin_key = admin_key
        self._is_stale = False
        """Whether the server's cache may be of other weights than it has."""

    def described(self) -> dict[str, str | None]:
        return {**super().described(), "api_key": self._admin_key or self.api_key}

    def label(self) -> str:
        return str(self.get("model_info")["weight_version"])

    def post(self, path: str, content: object = None, timeout_s: float | None = None) -> Any:
        return super().post(path, {} if content is None else content, timeout_s)

    def prepare(self, version: NewVersion) -> None:
        self._prepared = None
        self._check_server()
        self._check_tensors(version)
        self.end()
        self._prepared = version

    def end(self) -> None:
        self.post("pause_generation", {"mode": "retract"})  # running requests are computed again, from their tokens
        try:
            self.repeat(lambda: self.post("flush_cache"), RELEASE_S)  # is answered after a load that is under way
        except LoadError:
            if self._is_stale:
                raise
        self._is_stale = False
        self._go_on()

    def change(self, newest: Callable[[], NewVersion]) -> int:
        version = newest()
        if self._prepared is None or self._prepared.tensors != version.tensors:
            self.prepare(version)
        with self.ended_on_error():
            self.pause()
            if newest().tensors == version.tensors:
                version = newest()
            self._load(version)
            self.resume()
        return version.number

    # ---- a change ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        if self._prepared is None:  # nobody has looked yet
            self._check_server()
        if self.running is Running.IN_FLIGHT:  # they go back to the queue, and their keys and values are discarded
            self.post("pause_generation", {"mode": "retract"})
            return
        with self._closed_door() as drained:

            def stop() -> None:
                drained()
                self.post("pause_generation", {"mode": "in_place"})
                try:
                    self.post("flush_cache")
                except LoadError:
                    self._go_on()
                    raise

            self.repeat(stop, self.answer_s)

    @contextlib.contextmanager
    def _closed_door(self) -> Iterator[Callable[[], None]]:
        """Lets no new request begin. Yields a function that waits until no request runs."""
        answered, is_over = threading.Condition(), threading.Event()
        count = 0
        errors: list[KeepstepError] = []

        def call() -> None:
            nonlocal count
            while not is_over.is_set():
                try:
                    self.post("end_weight_update")
                    error: KeepstepError | None = LoadError(f"{self.url}: another trainer had a weight update open")
                except KeepstepError as raised:
                    error = None if NO_SESSION in str(raised) else raised
                with answered:
                    count += 1
                    errors.extend([] if error is None else [error])
                    answered.notify_all()
                if error is not None:
                    return

        def drained() -> None:
            with answered:
                wanted = count + (NUM_DRAINED if not count else NUM_CALLS + NUM_DRAINED)
                is_so = answered.wait_for(lambda: count >= wanted or errors, self.answer_s)
                if errors:
                    raise errors[0]
                if not is_so:
                    raise LoadError(f"{self.url} has not completed its running requests within {self.answer_s:g} s")

        threads = [threading.Thread(target=call, daemon=True) for _ in range(NUM_CALLS)]
        for thread in threads:
            thread.start()
        try:
            yield drained
        finally:
            is_over.set()  # the calls that wait have the lock soon, and nothing depends on them

    def _load(self, version: NewVersion) -> None:
        if version.path is None:
            raise ConfigurationError(f"version {version.number} is in no file, and SGLang loads files")
        content = {
            "model_path": str(version.path),
            "load_format": "safetensors",
            "weight_version": str(version.number),
            "flush_cache": True,
        }
        self._is_stale = True  # until the server says something else
        try:
            self.post("update_weights_from_disk", content)
        except LoadError as error:
            if NOT_FLUSHED not in str(error):
                self._is_stale = False
                raise
            label = {"new_version": str(version.number), "abort_all_requests": False}
            self.post("update_weight_version", label)

    def resume(self) -> None:
        self.repeat(lambda: self.post("flush_cache"), self.answer_s)
        self._is_stale = False
        self._go_on()

    def _go_on(self) -> None:
        self.post("continue_generation", {"torch_empty_cache": False}, SHORT_S)

    # ---- what the server can load -----------------------------------------------------------------------------------

    def _check_server(self) -> None:
        """Raises:
        LoadError: the server is of a kind that goes on computing while it is paused, or keeps other caches.
        """
        settings, model = self.get("server_info"), self.get("model_info")
        for name in ("pp_size", "dp_size", "tokenizer_worker_num"):
            if (settings.get(name) or 1) > 1:
                raise LoadError(f"{self.url} has {name} {settings[name]}: it cannot be stopped as a whole")
        if settings.get("hicache_storage_backend"):
            raise LoadError(f"{self.url} keeps keys and values in a storage, which would outlive a change of weights")
        if model.get("has_image_understanding") or model.get("has_audio_understanding"):
            raise LoadError(f"{self.url} caches embeddings of images or audio, and has no route that discards them")

    def _check_tensors(self, version: NewVersion) -> None:
        """SGLang ends at a tensor of another shape, and goes on with a mixture if one is missing.

        Raises:
            LoadError: the published tensors are not those of the server's checkpoint; the message names one.
        """
        path = str(self.get("server_info")["model_path"])
        folder = _folder(path)
        known = _tensors_in(folder)
        names = plain_names(name for name, _dtype, _shape in version.tensors)
        published = {names[name]: (dtype, shape) for name, dtype, shape in version.tensors}
        if _is_tied(folder):
            known.pop("lm_head.weight", None)
            published.pop("lm_head.weight", None)
        for name in published.keys() - known.keys():
            raise LoadError(f"'{name}' is published, and the checkpoint of {self.url} ({path}) has no such tensor")
        for name in known.keys() - published.keys():
            raise LoadError(f"'{name}' of the checkpoint of {self.url} ({path}) is not published")
        for name, (dtype, shape) in published.items():
            dtype_there, shape_there = known[name]
            if shape != shape_there:
                raise LoadError(f"'{name}' has shape {shape}, and in the checkpoint of {self.url} {shape_there}")
            if (dtype_there in FLOATING) != ("float" in dtype):
                raise LoadError(f"'{name}' has dtype {dtype}, and in the checkpoint of {self.url} {dtype_there}")


def _tensors_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype (as safetensors calls it) and shape of each tensor of a checkpoint, by name.

    Raises:
        LoadError: there are no files in safetensors' format.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as opened:  # reads the header
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
                found |= {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
        except SafetensorError as error:
            raise LoadError(f"{file}: {error}") from error
    if not found:
        raise LoadError(f"{folder} has no *.safetensors, by which it could be seen what the server can load")
    return found


def _is_tied(folder: Path) -> bool:
    """Whether a checkpoint's head is its embedding."""
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False))
    except (OSError, ValueError):
        return False


def _folder(path: str) -> Path:
    """Returns the folder of a checkpoint: a folder, or the name of a model whose files are in Hugging Face's cache.

    Raises:
        LoadError: it is not on this machine.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # it is missing, or finds nothing, in its own words
        raise LoadError(f"the checkpoint {path} is not on this machine: {error}") from error
