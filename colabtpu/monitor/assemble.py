"""`callbacks()`: everything that watches a training run, in one call.

model.fit(train, callbacks=callbacks("logs", tpu, data=train, validation=valid))
"""

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import keras

from colabtpu.errors import InvalidArgumentError
from colabtpu.monitor.figures import Figures
from colabtpu.monitor.panel import Panel
from colabtpu.monitor.pictures import Picture
from colabtpu.monitor.profiling import Profile
from colabtpu.monitor.run_files import Mirror
from colabtpu.monitor.training import TrainingLog


def callbacks(
    logdir: str | os.PathLike[str],
    connection: Any = None,
    data: Any = None,
    *,
    validation: Any = None,
    run: str | None = None,
    lag: int = 2,
    histograms_every: int = 500,
    pictures: Sequence[Picture] = (),
    profile_steps: int = 0,
    panel: bool | None = None,
    mirror: Mirror | None = None,
    hparams: Mapping[str, Any] | None = None,
    flops_per_token: float | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that log a training run for TensorBoard.

    Args:
        logdir: the folder that holds all runs, the one to give to `tensorboard`.
        connection: what `connect()` returned; tells the chip's peak, for MFU.
        data: the training batches; their `tokens_per_step` is the token count of a step, their
            `num_tokens` and `num_bytes` give bits a byte. Without it tokens are counted where
            the input is `(batch, seq)` of whole numbers.
        validation: the validation batches, for their bits a byte.
        run: the name of this run's folder; the same name continues an earlier run's curves.
            `None` makes a new one from the date and time.
        lag: how many steps stay enqueued while a value is read.
        histograms_every: steps between histograms of weights, gradients and activations, each
            of which costs one extra step; 0 for none.
        pictures: what to draw at the end of each epoch, such as `NextTokens` or `Confusion`.
        profile_steps: steps to trace after the first five; prints where their time went.
        panel: whether to show the live panel; `None` shows it in a notebook.
        mirror: another tracker that gets the same values, such as `weights_and_biases`.
        hparams: hyper-parameters to record, beside those read from the model.
        flops_per_token: of training, for MFU; `None` takes the model's.

    Returns:
        Callbacks for `model.fit`, usable beside any others, and for several fits in a row.

    Raises:
        InvalidArgumentError: a count is negative, or `run` is not a plain folder name.
        ColabTPUError: the tensorboard package is not installed.
    """
    counts = {
        "lag": lag,
        "histograms_every": histograms_every,
        "profile_steps": profile_steps,
    }
    for name, value in counts.items():
        if value < 0:
            raise InvalidArgumentError(
                f"`{name}` must be 0 or more. Received: {name}={value}", "Leave it out."
            )
    if run is not None and (not run or Path(run).is_absolute() or ".." in Path(run).parts):
        raise InvalidArgumentError(
            f"`run` must be a folder name inside `logdir`. Received: run={run!r}",
            "Pass a name such as 'first-try', or None for the date and time.",
        )
    folder = Path(logdir).expanduser() / (run or datetime.now().strftime("%Y%m%d-%H%M%S"))
    figures = Figures(connection, data, validation, flops_per_token, hparams)
    log = TrainingLog(folder, figures, lag, histograms_every, mirror, pictures)
    parts: list[keras.callbacks.Callback] = [log]
    if profile_steps:
        parts.append(Profile(folder, log, profile_steps))
    if in_notebook() if panel is None else panel:
        parts.append(Panel(log))
    return parts


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")
