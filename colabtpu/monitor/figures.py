"""From what a step returned to what is written: units, derived figures, their formulas.

    figures = Figures(connection, data=train, validation=valid)
    figures.training(numbers, meter)       # {"loss": ..., "speed/mfu_percent": ..., ...}

MFU, in per cent, is tokens/s x FLOPs a token / (devices x peak FLOP/s of one device), with the
FLOPs of forward and backward as in Chowdhery et al. 2022, PaLM, appendix B. Where the chip is
unknown it is 0, never a guess. Bits a byte are loss / ln 2 x tokens / bytes of the text.
"""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import keras

from colabtpu.monitor.memory import device_memory, host_bytes
from colabtpu.monitor.meter import Meter
from colabtpu.monitor.run_files import RunFiles

GIB = 2**30
# Memory changes slowly, and asking costs a call into the runtime.
MEMORY_SECONDS = 5.0

_HEALTH = ("gradient_norm", "parameter_norm", "update_ratio")


class Figures:
    """Derives what is written from what was measured.

    Args:
        connection: what `connect()` returned, or `None`: then the chip is unknown.
        data: the training batches; `tokens_per_step`, `num_tokens` and `num_bytes` are used
            where they exist.
        validation: the validation batches, likewise.
        flops_per_token: of training; `None` takes the model's.
        hparams: hyper-parameters to record beside those read from the model.
    """

    def __init__(
        self,
        connection: Any = None,
        data: Any = None,
        validation: Any = None,
        flops_per_token: float | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._tokens_per_step = getattr(data, "tokens_per_step", None)
        self._bits_factor = {"train": _bits_factor(data), "validation": _bits_factor(validation)}
        self._flops_per_token = flops_per_token
        self._hparams = dict(hparams or {})
        self._has_tokens = self._tokens_per_step is not None
        self._said_no_tokens = False
        self._memory: dict[str, float] = {}
        self._memory_at = -math.inf

    def tokens(self, numbers: dict[str, float]) -> float:
        """Returns the tokens of the step with these `numbers`, 0 where it has none."""
        tokens = self._tokens_per_step or numbers.get("tokens", 0.0)
        self._has_tokens = tokens > 0
        if not tokens and not self._said_no_tokens:
            self._said_no_tokens = True
            print(
                "No tokens per second: the input is not (batch, seq) of whole numbers. "
                "Pass data= with `tokens_per_step` to have it."
            )
        return float(tokens)

    def training(self, numbers: dict[str, float], meter: Meter) -> dict[str, float]:
        """Returns tag -> value for a training step that returned `numbers`."""
        sizes = ("tokens", "examples")
        written = {
            f"health/{name}" if name in _HEALTH else name: value
            for name, value in numbers.items()
            if name not in sizes
        }
        return self._with_derived("train", written) | self._speed(meter) | self._memory_now()

    def validation(self, numbers: dict[str, float]) -> dict[str, float]:
        """Returns tag -> value for a validation that gave `numbers`."""
        return self._with_derived("validation", numbers)

    def describe(self, model: keras.Model, files: RunFiles) -> None:
        """Writes what the run is: hyper-parameters, configuration, the model's summary."""
        if self._flops_per_token is None:
            from colabtpu.models import flops_per_token

            self._flops_per_token = flops_per_token(model) if model.built else 0.0
        hparams = _model_hparams(model) | _connection_hparams(self._connection) | self._hparams
        metrics = ("loss", "perplexity") if self._has_tokens else ("loss",)
        files.hparams(hparams, metrics)
        rows = "\n".join(f"| {name} | {value} |" for name, value in hparams.items())
        files.text(0, "run/hyper-parameters", f"| name | value |\n| --- | --- |\n{rows}")
        files.text(0, "run/mfu", self._mfu_formula())
        files.text(0, "model/summary", _fenced(_summary(model)))
        files.text(0, "model/config", _fenced(_config(model)))

    def mfu_percent(self, tokens_per_second: float) -> float:
        """Returns the share of the chips' peak that training reaches, 0 where that is unknown."""
        peak = self._peak_flops()
        if not peak or not self._flops_per_token:
            return 0.0
        return 100.0 * tokens_per_second * self._flops_per_token / peak

    def _peak_flops(self) -> float:
        chip = getattr(self._connection, "chip", None)
        return chip.peak_bf16_flops_per_device * self._connection.num_cores if chip else 0.0

    def _mfu_formula(self) -> str:
        peak = self._peak_flops()
        return (
            "MFU = tokens/s x FLOPs a token / (devices x peak FLOP/s of a device)\n\n"
            f"FLOPs a token: {self._flops_per_token or 0:.4g}; peak of all devices: "
            + (f"{peak:.4g} FLOP/s (bfloat16)" if peak else "unknown chip, so MFU is shown as 0")
        )

    def _with_derived(self, folder: str, numbers: dict[str, float]) -> dict[str, float]:
        # exp of a mean cross-entropy; for other inputs the loss need not be one.
        if not self._has_tokens or "loss" not in numbers:
            return numbers
        loss = numbers["loss"]
        derived = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
        factor = self._bits_factor[folder]
        if factor is not None:
            derived["bits_per_byte"] = loss * factor
        return numbers | derived

    def _speed(self, meter: Meter) -> dict[str, float]:
        tokens_per_second = meter.tokens_per_second
        speed = {
            "speed/step_seconds": meter.step_seconds,
            "speed/tokens_per_second": tokens_per_second,
            "speed/mfu_percent": (
                None if tokens_per_second is None else self.mfu_percent(tokens_per_second)
            ),
            "speed/data_wait_share": meter.data_wait_share,
        }
        return {name: value for name, value in speed.items() if value is not None}

    def _memory_now(self) -> dict[str, float]:
        """Memory, when it is time to look again; else nothing."""
        now = time.monotonic()
        if now < self._memory_at + MEMORY_SECONDS:
            return {}
        self._memory_at = now
        host, device = host_bytes(), device_memory(keras.backend.backend())
        self._memory = {} if host is None else {"memory/host_gib": host / GIB}
        if device is not None:
            self._memory["memory/hbm_gib"] = device.used_bytes / GIB
            self._memory["memory/hbm_peak_gib"] = device.peak_bytes / GIB
            if device.limit_bytes:
                self._memory["memory/hbm_limit_gib"] = device.limit_bytes / GIB
        return self._memory


def _bits_factor(data: Any) -> float | None:
    """Nats a token to bits a byte, for a text whose tokens and bytes are known."""
    tokens, size = (getattr(data, name, None) for name in ("num_tokens", "num_bytes"))
    return tokens / size / math.log(2) if tokens and size else None


def _model_hparams(model: keras.Model) -> dict[str, Any]:
    values: dict[str, Any] = {"model": model.name, "dtype": model.dtype_policy.name}
    if model.built:
        values["parameters"] = model.count_params()
    optimizer = model.optimizer
    if optimizer is not None:
        values["optimizer"] = type(optimizer).__name__
        config = optimizer.get_config()
        rate = config.get("learning_rate")
        if isinstance(rate, dict):
            # A schedule: its kind, and its numbers one by one.
            values["learning_rate"] = rate.get("class_name", "schedule")
            numbers = rate.get("config", {}).items()
            values |= {f"learning_rate.{k}": v for k, v in numbers if isinstance(v, int | float)}
        elif rate is not None:
            values["learning_rate"] = float(rate)
        for name in ("weight_decay", "clipnorm", "global_clipnorm", "gradient_accumulation_steps"):
            if config.get(name) is not None:
                values[name] = config[name]
    return values


def _connection_hparams(connection: Any) -> dict[str, Any]:
    if connection is None:
        return {"engine": keras.backend.backend()}
    chip = connection.chip.name if connection.chip else connection.device
    return {"engine": connection.engine, "device": chip, "devices": connection.num_cores}


def _summary(model: keras.Model) -> str:
    lines: list[str] = []
    try:
        model.summary(print_fn=lambda line, **_: lines.append(line), line_length=100)
    except ValueError as error:  # A model that is not built has none.
        return str(error)
    return "\n".join(lines)


def _config(model: keras.Model) -> str:
    try:
        return json.dumps(json.loads(model.to_json()), indent=1)[:20_000]
    except (NotImplementedError, TypeError, ValueError) as error:
        return f"this model has no configuration: {error}"


def _fenced(text: str) -> str:
    return f"```\n{text}\n```"
