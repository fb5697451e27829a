"""A vLLM server. Its workers receive versions by keepstep's backend (`keepstep.integrations.vllm`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from keepstep.engines.server import ANSWER_S, RELEASE_S, SHORT_S, NewVersion, Running, Server
from keepstep.errors import KeepstepError, LoadError

PAUSE_MODE = {Running.DRAIN: "wait", Running.IN_FLIGHT: "keep"}
RECEIVE_S = 30.0
"""How long a version may take to reach all workers of a server, after the publishers have sent it."""
AGREE_S = 2.0
"""How long workers of a paused server may take to agree, if a newer version has just overwritten the one to load."""


class VLLMServer(Server):
    """A server with vLLM's routes for reinforcement learning (``VLLM_SERVER_DEV_MODE=1``).

    No worker writes to its model before all of them have the whole version, and no request is computed between the
    first write and the reset of the caches.
    """

    kind = "vllm"

    def __init__(
        self,
        url: str,
        *,
        running: Running = Running.DRAIN,
        api_key: str | None = None,
        answer_s: float = ANSWER_S,
        is_part: bool = False,
    ) -> None:
        """As for `Server`.

        Args:
            is_part: whether the published tensors are a part of the model: layers that get none then keep theirs.
        """
        super().__init__(url, running=running, api_key=api_key, answer_s=answer_s)
        self._is_part = is_part
        self._label: str | None = None
        self._is_open = False
        """Whether a session is open, as far as this process knows."""

    def label(self) -> str:
        try:
            label = str(self.get("weight_info")["weight_version"])
        except KeepstepError as error:
            self._prepared = None
            if isinstance(error, LoadError) and " with 404: " in str(error):
                raise LoadError(f"{error}: start the server with VLLM_SERVER_DEV_MODE=1") from None
            raise
        if label != self._label:  # it was restarted
            self._prepared = None
        return label

    def prepare(self, version: NewVersion) -> None:
        self._prepared = None
        self._release()
        tensors = [[name, dtype, [*shape]] for name, dtype, shape in version.tensors]
        content = {"folder": version.folder, "tensors": tensors, "part": self._is_part}
        self.initialize(content)
        self._label = self.label()
        self._prepared = version

    def end(self) -> None:
        torn = self._release()
        if torn is not None:
            raise torn

    def _release(self) -> LoadError | None:
        """Ends an open session. Requests go on, unless the model holds parts of a version: then it says so."""

        def begin() -> None:
            try:
                self.start_weight_update()
            except LoadError:  # most likely a session is open; then this ends it
                self._close()
                raise

        self.repeat(begin, RELEASE_S)
        try:
            self.update_weights({})
        except LoadError as error:
            return error
        finally:
            self._close(selects=False)
        self.resume()
        return None

    def change(self, newest: Callable[[], NewVersion]) -> int:
        version = newest()
        self.label()
        known = self._prepared
        with self.ended_on_error():
            if known is None or (known.folder, known.tensors) != (version.folder, version.tensors):
                self.prepare(version)
            self.repeat(lambda: self._ask(newest().number), RECEIVE_S)
            self.pause()
            number = self.repeat(lambda: self._ask(newest().number, use=True), AGREE_S)
            self._label = str(number)
            self.finish_weight_update(self._label)
            self._is_open = False
            self.resume()
        return number

    def _ask(self, number: int, *, use: bool = False) -> int:
        """Asks all workers whether they have a version, in a session that stays open if they have."""
        if not self._is_open:
            self.start_weight_update()
            self._is_open = True
        try:
            self.update_weights({"version": number, "use": use})
        except LoadError:  # some workers have ended the session, and others have not
            self._close(selects=use)
            raise
        return number

    def _close(self, *, selects: bool = True) -> None:
        """Ends the session on each worker where one is open. No worker loads a version that it has selected.

        Only some workers may have selected it; and it would be loaded without its label.

        Args:
            selects: whether a worker may have selected one.
        """
        self._is_open = False
        if selects:
            with contextlib.suppress(LoadError):
                self.update_weights({})
        with contextlib.suppress(LoadError):
            self.finish_weight_update()

    # ---- the server's routes ----------------------------------------------------------------------------------------

    def initialize(self, init_info: dict[str, Any]) -> None:
        """Has the workers attach to the publishers."""
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Opens a session."""
        self.post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `keepstep.integrations.vllm.KeepstepUpdateInfo`."""
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Loads the version that was selected, and ends the session."""
        self.post("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})

    def pause(self) -> None:
        self.post(f"pause?mode={PAUSE_MODE[self.running]}")

    def resume(self) -> None:
        self.discard_caches()
        self.repeat(lambda: self.post("resume", timeout_s=SHORT_S), self.answer_s)

    def discard_caches(self) -> None:
        """Discards what was computed with former weights: keys and values, outputs of encoders, processed inputs."""

        def reset() -> None:
            answer = self.post("reset_prefix_cache?reset_running_requests=true&reset_external=true")
            if isinstance(answer, dict) and not answer.get("success", True):
                raise LoadError(f"{self.url} cannot reset its prefix cache: blocks of it are held")

        self.repeat(reset, RELEASE_S)
        self.post("reset_encoder_cache")
        self.post("reset_mm_cache")
