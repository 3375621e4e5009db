"""`connect()`: the best device this machine has, ready for Keras, and why it is that one.

    import colabtpu as ct

    tpu = ct.connect()                       # TPU, else GPU, else 8 CPU devices; prints a card
    with tpu.scope():
        model = build_model()
        model.compile(optimizer="adamw", loss="mse")
    model.fit(x, y, batch_size=tpu.batch_size(per_core=128))

Call it before TensorFlow, JAX or Keras is imported: it sets the variables that they read.
"""

import dataclasses
import html
import os
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from colabtpu import batching, doctor, jax_engine, tensorflow_engine
from colabtpu import environment as surroundings
from colabtpu.chips import Chip
from colabtpu.environment import Environment
from colabtpu.failures import (
    BY_CODE,
    AcceleratorError,
    AlreadyConnectedError,
    MissingEngineError,
    NoTPUError,
    TooLateError,
    TPUBusyError,
    UnreachableError,
    WrongBuildError,
    WrongLibtpuError,
)
from colabtpu.wish import (
    LABELS,
    Wish,
    candidates,
    legacy_address,
    require_backend,
    require_no_bystander,
)

__all__ = [
    "AcceleratorError",
    "AlreadyConnectedError",
    "Connection",
    "MissingEngineError",
    "NoTPUError",
    "TPUBusyError",
    "TooLateError",
    "UnreachableError",
    "WrongBuildError",
    "WrongLibtpuError",
    "connect",
]

_lock = threading.Lock()
_current: "Connection | None" = None


@dataclass(frozen=True, eq=False)
class Connection:
    """The devices that this process trains on; `connect()` makes it, once.

    Attributes:
        engine: `"tensorflow"` or `"jax"`, which is also the Keras backend.
        device: `"tpu"`, `"gpu"` or `"cpu"`.
        chip: the TPU generation, `None` without a TPU or where it is unknown.
        devices: the names of the devices, one for each replica.
        notes: what was looked for, what was found, and why it came to this.
        address: `"local"`, or where the TPU worker is; `None` without a TPU.
        handle: the `tf.distribute` strategy or the `keras.distribution` behind it.
    """

    engine: str
    device: str
    chip: Chip | None
    devices: tuple[str, ...]
    notes: tuple[str, ...]
    address: str | None = None
    handle: Any = field(default=None, repr=False)

    @property
    def num_cores(self) -> int:
        """The number of replicas: TPU cores as the engine lists them, GPUs, or CPU devices."""
        return len(self.devices)

    @property
    def strategy(self) -> Any:
        """The `tf.distribute.Strategy`.

        Raises:
            AcceleratorError: the engine is JAX, which has none.
        """
        if self.engine != "tensorflow":
            raise AcceleratorError(
                "A strategy exists on TensorFlow only; this connection runs on JAX.",
                "Use `.distribution` or `.scope()`, which works on both, "
                "or restart the kernel and connect(engine='tensorflow').",
            )
        return self.handle

    @property
    def distribution(self) -> Any:
        """The `keras.distribution.DataParallel`.

        Raises:
            AcceleratorError: the engine is TensorFlow, where Keras ignores distributions.
        """
        if self.engine != "jax":
            raise AcceleratorError(
                "A Keras distribution works on JAX only; this connection runs on TensorFlow.",
                "Use `.strategy` or `.scope()`, which works on both, "
                "or restart the kernel and connect(engine='jax').",
            )
        return self.handle

    @property
    def mesh(self) -> Any:
        """The `jax.sharding.Mesh` of the distribution, with one axis, `"batch"`."""
        return jax_engine.mesh(self.distribution)

    def scope(self) -> AbstractContextManager[Any]:
        """The scope in which to build, load and compile a model, on either engine."""
        return self.handle.scope()

    def batch_size(
        self,
        per_core: int = 128,
        *,
        tokens_per_row: int | None = None,
        multiple: int = batching.MULTIPLE,
    ) -> int:
        """The global batch for `model.fit`, whose arithmetic it prints.

        Args:
            per_core: rows for each replica, rounded up to a multiple of `multiple`.
            tokens_per_row: the sequence length, to have the tokens counted too.
            multiple: see `batching.global_batch`.

        Returns:
            Rows in a batch, a multiple of the number of replicas.

        Raises:
            InvalidArgumentError: a number that is not a positive whole one.
        """
        batch = batching.global_batch(per_core, self.num_cores, multiple=multiple)
        print(batch.describe(tokens_per_row))
        return batch.global_batch

    def describe(self) -> str:
        """The card as text."""
        rows = [f"  {name:<9} {value}" for name, value in self._rows()]
        return "\n".join([self._title(), *rows, *(f"  - {note}" for note in self.notes)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.describe())

    def _repr_html_(self) -> str:
        cell = "<tr><td style='text-align:left;opacity:.7'>{}</td><td style='text-align:left'>{}"
        rows = "".join(cell.format(n, html.escape(v)) + "</td></tr>" for n, v in self._rows())
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return (
            "<div style='border:1px solid #8884;border-radius:8px;padding:.6em 1em;"
            f"max-width:60em'><b>{html.escape(self._title())}</b>"
            f"<table>{rows}</table><ul style='margin:.3em 0'>{notes}</ul></div>"
        )

    def _title(self) -> str:
        kind = f"TPU {self.chip.name}" if self.chip else self.device.upper()
        plural = "" if self.num_cores == 1 else "s"
        instead = any(n.startswith("TPU through") for n in self.notes) and self.device != "tpu"
        return (
            f"Connected: {kind}, {self.num_cores} replica{plural}, {LABELS[self.engine]}"
            f"{', and not the TPU' if instead else ''}"
        )

    def _rows(self) -> list[tuple[str, str]]:
        first, last = self.devices[0], self.devices[-1]
        rows = [("devices", first if first == last else f"{first} … {last}")]
        if self.address not in (None, "local"):
            rows.append(("address", str(self.address)))
        if self.chip:
            rows.append(
                (
                    "chip",
                    f"{self.chip.peak_bf16_flops_per_device / 1e12:.0f} bf16 TFLOP/s and "
                    f"{self.chip.hbm_usable_bytes / 2**30:.2f} GiB a device",
                )
            )
        rows.append(("batch", str(batching.global_batch(128, self.num_cores))))
        return rows


def connect(engine: str = "auto", devices: int | None = None, tpu: str | None = None) -> Connection:
    """Connects Keras to the best device there is: a TPU, else a GPU, else CPU devices.

    A second call returns the same connection; a TPU is never initialised twice.

    Args:
        engine: `"tensorflow"`, `"jax"`, or `"auto"`: TensorFlow (or what KERAS_BACKEND asks
            for) if a probe in a process of its own shows that it works here, else the other.
        devices: how many to use; by default every TPU core or GPU, or 8 logical CPU devices.
        tpu: `"local"`, a `grpc://HOST:PORT` address, or a Cloud TPU's name (TensorFlow only). By
            default this machine's TPU, or the address that a legacy variable such as TPU_NAME
            holds.

    Returns:
        The `Connection`, after printing its card.

    Raises:
        AcceleratorError: one of its subclasses, each with its fix. With `engine="auto"` a TPU
            that cannot work is told on the card instead, and the next best device taken; one
            that a restart or a freed chip would give is raised.
        InvalidArgumentError: a bad argument.
    """
    global _current
    wish = Wish.checked(engine, devices, tpu)
    with _lock:
        if _current is None:
            _current = open_connection(wish, surroundings.detect())
        else:
            _require_same(_current, wish)
        connection = _current
    _show(connection)
    return connection


def open_connection(wish: Wish, environment: Environment) -> Connection:
    """Opens what `wish` asks for in `environment`, without the cache that `connect()` keeps."""
    notes: list[str] = []
    if not environment.on_gce:
        # Elsewhere libtpu would ask Google Cloud's metadata server 30 times before it gives up.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        # TensorFlow's start-up chatter would fill a notebook's cells; its errors still show.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if environment.accelerator == "tpu" or wish.tpu is not None:
        address: str | None = wish.tpu or "local"
        notes.append(f"TPU: {address}; {', '.join(environment.evidence) or 'as asked'}")
    else:
        address, source = legacy_address(environment.variables)
        notes.append(f"TPU: {source}")
    engines = candidates(wish, environment, notes)
    if address not in (None, "local") and "tensorflow" not in engines:
        notes.append("TPU: not tried, JAX opens this machine's TPU only")
    elif address is not None:
        opened = _open_tpu(wish, environment, address, engines, notes)
        if opened is not None:
            return opened
    return _open_local(wish, environment, engines[0], notes)


def _open_tpu(
    wish: Wish, environment: Environment, address: str, engines: tuple[str, ...], notes: list[str]
) -> Connection | None:
    """Tries each engine on the TPU; `None` when "auto" may go on to the next device."""
    failures = []
    for engine in engines if address == "local" else ("tensorflow",):
        try:
            if address == "local":
                _require_ready(engine, environment)
            require_backend(engine, environment, notes)
            if engine == "tensorflow":
                names, handle = tensorflow_engine.open_tpu(
                    environment, address, wish.devices, notes
                )
            else:
                names, handle = jax_engine.open_tpu(wish.devices, notes)
                jax_engine.keep_tensorflow_off(environment, notes)
        except AcceleratorError as error:
            if wish.engine != "auto" or not error.falls_back:
                raise
            failures.append(error)
            notes.append(f"TPU through {LABELS[engine]}: no. {error.what} Fix: {error.fix}")
            continue
        chip = environment.chip if address == "local" else None
        return _connection(engine, "tpu", chip, names, notes, address=address, handle=handle)
    if wish.tpu is not None:
        raise next((f for f in failures if isinstance(f, NoTPUError)), failures[0])
    require_no_bystander(engines, address, notes)
    return None


def _open_local(wish: Wish, environment: Environment, engine: str, notes: list[str]) -> Connection:
    require_backend(engine, environment, notes)
    module = tensorflow_engine if engine == "tensorflow" else jax_engine
    if environment.accelerator != "gpu":
        notes.append("GPU: none with a working driver")
    device, names, handle = module.open_local(environment, wish.devices, notes)
    if device == "cpu":
        notes.append(
            f"CPU: {len(names)} logical devices on {os.cpu_count()} processor cores; more devices "
            "than one show how a batch is split, they do not make it faster"
            if len(names) > 1
            else "CPU: one device"
        )
    return _connection(engine, device, None, names, notes, handle=handle)


def _connection(
    engine: str,
    device: str,
    chip: Chip | None,
    names: tuple[str, ...],
    notes: list[str],
    *,
    handle: Any,
    address: str | None = None,
) -> Connection:
    import keras

    version = sys.modules[engine].__version__
    notes.append(f"Versions: {LABELS[engine]} {version}, Keras {keras.__version__}")
    return Connection(engine, device, chip, names, tuple(notes), address, handle)


def _require_ready(engine: str, environment: Environment) -> None:
    """Raises the first error that the doctor sees: quicker than a probe, and better explained."""
    if environment.variables.get("ALLOW_MULTIPLE_LIBTPU_LOAD") in ("1", "true"):
        others = tuple(h for h in environment.tpu_holders if "lockfile" not in h.path)
        environment = dataclasses.replace(environment, tpu_holders=others)
    for finding in doctor.diagnose(environment, engine).findings:
        if finding.severity == "error":
            kind = BY_CODE.get(finding.code, AcceleratorError)
            raise kind(f"{finding.what} {finding.why}", finding.fix)


def _require_same(connection: Connection, wish: Wish) -> None:
    asked = {
        "engine": (wish.engine, connection.engine, wish.engine == "auto"),
        "devices": (wish.devices, connection.num_cores, wish.devices is None),
        "tpu": (wish.tpu, connection.address, wish.tpu is None),
    }
    for name, (value, there, any_will_do) in asked.items():
        if not any_will_do and value != there:
            raise AlreadyConnectedError(
                f"This process is connected with {name}={there!r}. Received: {name}={value!r}",
                "Restart the kernel to connect differently, or call connect() without arguments "
                "to have the present connection.",
            )


def _show(connection: Connection) -> None:
    if "IPython" in sys.modules:
        from IPython import display, get_ipython

        if getattr(get_ipython(), "kernel", None) is not None:
            display.display(connection)
            return
    print(connection.describe())
