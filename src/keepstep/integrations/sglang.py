"""Updates an SGLang server through its endpoint ``/update_weights_from_disk``, with files in shared memory. No pickle.

A separate process on the server's machine receives each version, writes it to a folder in shared memory, and requests
the server to load it. The server completes its running requests before it loads, so no answer mixes two versions.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors.torch import save_file

from keepstep.errors import LoadError
from keepstep.weights.inbox import VersionInbox
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S


class ServerUpdates:
    """Updates one SGLang server on this machine with published versions."""

    def __init__(
        self,
        folder: str | Path,
        url: str,
        *,
        api_key: str | None = None,
        memory: str | Path = "/dev/shm",
        device: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
        answer_s: float = 300.0,
    ) -> None:
        """Args:
        folder, device, deadline_s: see `keepstep.Subscriber`. The published names must be those of a checkpoint that
            the server can load.
        url: base URL of the server, such as ``http://127.0.0.1:30000``.
        api_key: the server's ``--admin-api-key`` or else its ``--api-key``, if it has one.
        memory: parent folder for the versions. It holds one version, and two while the server loads the next.
        answer_s: timeout for the server to complete its running requests and load a version, in seconds.
        """
        self.version: int | None = None
        """The last version that the server has loaded; None before the first."""
        self._url, self._answer_s = url.rstrip("/"), answer_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._memory = Path(tempfile.mkdtemp(prefix="keepstep-sglang-", dir=memory))
        self._inbox = VersionInbox(folder, device=device, name=f"SGLang at {url}", deadline_s=deadline_s)

    def update(self, timeout_s: float) -> int:
        """Waits for a version, makes the server load it, and returns its number. Call it in a loop.

        Args:
            timeout_s: how long to wait for a version.

        Raises:
            LoadError: the server did not answer, or it refused the version. A refusal may come halfway through loading,
                so `update` has then requested the server to load the former version again.
            KeepstepError: no version arrived in time; with the reason, if known. The server has kept its version.
        """
        version, tensors = self._inbox.take(timeout_s)
        refusal = self._load(version, self._write(version, tensors))
        if refusal is not None:
            former = None if self.version in (None, version) else self._load(self.version, self._path(self.version))
            shutil.rmtree(self._path(version))
            also = "" if former is None else f"; and version {self.version}, to which it was to go back: {former}"
            raise LoadError(f"SGLang refused version {version}: {refusal}{also}")
        if self.version is not None and self.version != version:
            shutil.rmtree(self._path(self.version))
        self.version = version
        return version

    def close(self) -> None:
        """Disconnects from the publisher and deletes the files. The server keeps its weights."""
        self._inbox.close()
        shutil.rmtree(self._memory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _path(self, version: int) -> Path:
        return self._memory / f"version-{version}"

    def _write(self, version: int, tensors: dict[str, torch.Tensor]) -> Path:
        """Writes a version as a checkpoint of one file, in a folder of its own: the server may still read another."""
        path = self._path(version)
        path.mkdir(exist_ok=True)  # a job may come to a version again
        save_file(tensors, path / "model.safetensors.new", metadata={"format": "pt"})
        (path / "model.safetensors.new").rename(path / "model.safetensors")
        return path

    def _load(self, version: int, path: Path) -> str | None:
        """Makes the server load a version. Returns None, or the reason if the server refuses."""
        content = {"model_path": str(path), "load_format": "safetensors", "weight_version": str(version)}
        data = json.dumps(content).encode()
        request = urllib.request.Request(f"{self._url}/update_weights_from_disk", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._answer_s) as response:
                json.load(response)
        except urllib.error.HTTPError as error:  # 400: the server refuses the version; 401: the API key is wrong
            return f"{error.code}: {error.read(1000).decode(errors='replace')}"
        except (OSError, ValueError) as error:
            raise LoadError(f"SGLang did not answer for version {version}: {error}") from error
        return None
