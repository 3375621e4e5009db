"""The same curves in Weights & Biases, offline unless asked otherwise.

    wandb = weights_and_biases("my-project", folder="logs")
    model.fit(..., callbacks=callbacks("logs", tpu, mirror=wandb))
    wandb.finish()

Needs `pip install "colabtpu[wandb]"`. Names are those of the event files, with the folder in
front: `train/loss`, `validation/loss`.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from colabtpu.errors import ColabTPUError


class weights_and_biases:
    """A mirror for `callbacks(mirror=...)`.

    Args:
        project: the project's name.
        folder: where runs are kept; in offline mode `wandb sync` sends them from there.
        mode: `"offline"`, `"online"` or `"disabled"`.
        config: hyper-parameters to record.

    Raises:
        ColabTPUError: the wandb package is not installed.
    """

    def __init__(
        self,
        project: str,
        folder: str | os.PathLike[str] = "logs",
        mode: str = "offline",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ColabTPUError(
                f"Weights & Biases is not installed ({error}).", "Run `pip install wandb`."
            ) from error
        os.makedirs(folder, exist_ok=True)
        self._wandb = wandb
        self.run = wandb.init(
            project=project, dir=os.fspath(folder), mode=mode, config=dict(config or {})
        )
        # Its own step only goes up; validation and a resumed run come with theirs.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def __call__(self, folder: str, step: int, values: dict[str, Any]) -> None:
        prefix = f"{folder}/" if folder else ""
        shown = {f"{prefix}{name}": self._shown(value) for name, value in values.items()}
        self.run.log({**shown, "step": step})

    def finish(self) -> None:
        """Writes what is left and ends the run."""
        self.run.finish()

    def _shown(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._wandb.Image(value)
        if isinstance(value, str):
            return self._wandb.Html(f"<pre>{value}</pre>")
        return value
