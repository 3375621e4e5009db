"""Opens a TPU in a process of its own, so that an abort, a segfault or a hang stays there.

    python -P colabtpu/probe.py tensorflow local

libtpu ends the process that asks it in more ways than Python can catch: it aborts at import
when it is too new for TensorFlow, segfaults in PJRT mode where no chip answers, and waits for
ever when a stale process holds the device. The first half runs in the user's process; the
second half is the child, which is this same file run as a script and imports nothing of ours.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A cold TPU takes 10 to 60 s to initialise and to compile its first program.
SECONDS_ALLOWED = 180.0
_MARK = "colabtpu-probe:"
_KEEP = 20_000


@dataclass(frozen=True)
class Outcome:
    """What a probe left behind.

    Attributes:
        answer: what the child found, such as `{"cores": 8}`; `None` if it failed.
        stage: the last thing it began: `"start"`, `"import"`, `"connect"`, `"initialise"`,
            `"compute"`.
        status: its exit status, `-11` for a segfault; `0` when it succeeded.
        timed_out: whether it was stopped for taking longer than `seconds_allowed`.
        output: the end of what it wrote.
        seconds_allowed: how long it had.
    """

    answer: dict[str, Any] | None
    stage: str
    status: int
    timed_out: bool
    output: str
    seconds_allowed: float

    @property
    def last_words(self) -> str:
        """The last line that the child wrote, shortened."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else f"none (exit status {self.status})"


def run(
    engine: str,
    address: str,
    variables: Mapping[str, str],
    *,
    seconds_allowed: float = SECONDS_ALLOWED,
    python: str = sys.executable,
) -> Outcome:
    """Opens the TPU in a child process, multiplies two matrices on it, and lets it go.

    Args:
        engine: `"tensorflow"` or `"jax"`.
        address: `"local"`, a `grpc://` address or a TPU's name; JAX knows only `"local"`.
        variables: the environment of the child.
        seconds_allowed: after that it is stopped, with every process it started.
        python: the interpreter that runs it.

    Returns:
        The `Outcome`; nothing is raised for a child that fails.
    """
    with subprocess.Popen(
        [python, "-P", "-u", str(Path(__file__).resolve()), engine, address],
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:
        timed_out = False
        try:
            written, _ = child.communicate(timeout=seconds_allowed)
        except subprocess.TimeoutExpired:
            timed_out = True
            _stop(child)
            written, _ = child.communicate()
        except BaseException:  # the user's interrupt must not leave a child holding the TPU
            _stop(child)
            raise
    output = written.decode(errors="replace")
    stage, answer = _read(output)
    return Outcome(
        answer=answer if child.returncode == 0 else None,
        stage=stage,
        status=child.returncode,
        timed_out=timed_out,
        output="\n".join(x for x in output.splitlines() if not x.startswith(_MARK))[-_KEEP:],
        seconds_allowed=seconds_allowed,
    )


def _stop(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _read(output: str) -> tuple[str, dict[str, Any] | None]:
    stage, answer = "start", None
    for line in output.splitlines():
        if line.startswith(_MARK):
            said = json.loads(line.removeprefix(_MARK))
            stage, answer = said.get("stage", stage), said.get("answer", answer)
    return stage, answer


# ---- the child --------------------------------------------------------------------------


def _say(**what: Any) -> None:
    print(f"\n{_MARK}{json.dumps(what)}", flush=True)


def _probe_tensorflow(address: str) -> dict[str, Any]:
    _say(stage="import")
    import tensorflow as tf

    _say(stage="connect")
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
    if address != "local":
        tf.config.experimental_connect_to_cluster(resolver)
    _say(stage="initialise")
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    cores = len(tf.config.list_logical_devices("TPU"))
    assignment = tf.tpu.experimental.DeviceAssignment.build(topology, num_replicas=cores)
    strategy = tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment)

    _say(stage="compute")
    replicas = strategy.num_replicas_in_sync
    square = tf.function(lambda: tf.linalg.trace(tf.matmul(tf.eye(128), tf.eye(128))))
    total = strategy.reduce("SUM", strategy.run(square), axis=None)
    return {"cores": replicas, "correct": float(total) == 128.0 * replicas}


def _probe_jax(address: str) -> dict[str, Any]:
    _say(stage="import")
    import jax
    import jax.numpy as jnp

    _say(stage="initialise")
    devices = jax.devices("tpu")
    _say(stage="compute")
    total = jnp.trace(jnp.eye(128) @ jnp.eye(128))
    return {"cores": len(devices), "correct": float(total) == 128.0}


def _main() -> None:
    engine, address = sys.argv[1:]
    probe = {"tensorflow": _probe_tensorflow, "jax": _probe_jax}[engine]
    _say(answer=probe(address))
    # No interpreter shutdown: closing a TPU client there is one more chance to hang.
    os._exit(0)


if __name__ == "__main__":
    _main()
