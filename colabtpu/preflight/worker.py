"""The process that runs libtpu, so that its crash or hang ends nothing else.

    python -m colabtpu.preflight.worker FOLDER

`FOLDER/request.json` and `FOLDER/module.mlir` go in; `FOLDER/result.json` comes out and is
written anew after every stage, so that what was found before a crash is kept.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Compiles the module in `folder` for the topology that its request names."""
    request = json.loads((folder / "request.json").read_text())
    result: dict[str, Any] = {"stage": "start"}

    def save(**found: Any) -> None:
        result.update(found)
        scratch = folder / "result.tmp"
        scratch.write_text(json.dumps(result))
        scratch.replace(folder / "result.json")

    save()
    client, devices = _client(request, save)
    started = time.perf_counter()
    try:
        executable = _compile(client, devices, (folder / "module.mlir").read_bytes())
    except Exception as error:  # noqa: BLE001  (every refusal of libtpu is a result)
        save(stage="refused", message=str(error), compile_seconds=time.perf_counter() - started)
        return
    save(stage="compiled", compile_seconds=time.perf_counter() - started)
    save(stage="done", **_figures(executable))


def _client(request: dict[str, Any], save: Any) -> tuple[Any, list[Any]]:
    import jax
    import jaxlib
    from jax.experimental import topologies

    save(stage="topology", jax_version=jax.__version__, jaxlib_version=jaxlib.__version__)
    topology = topologies.get_topology_desc(
        topology_name=request["topology"],
        platform="tpu",
        chips_per_host_bounds=tuple(request["chips_per_host_bounds"]),
    )
    devices = sorted(topology.devices, key=lambda d: d.id)[: request["num_partitions"]]
    client = devices[0].client
    save(stage="compiling", platform_version=client.platform_version)
    return client, devices


def _compile(client: Any, devices: list[Any], module: bytes) -> Any:
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[d.id for d in devices]]),
    )
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        parsed = ir.Module.parse(module)
        _drop_copies(parsed.operation)
        found = xla_client.DeviceList(tuple(devices))
        try:
            return client.compile(mlir.module_to_bytecode(parsed), found, options)
        except TypeError:  # jaxlib 0.8 and newer take the module itself
            return client.compile(parsed, found, options)


def _drop_copies(operation: Any) -> None:
    """Replaces TensorFlow's `mhlo.copy`, which libtpu's importer refuses, by its operand."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in list(block.operations):
                if inner.operation.name == "mhlo.copy":
                    inner.operation.results[0].replace_all_uses_with(inner.operation.operands[0])
                    inner.operation.erase()
                else:
                    _drop_copies(inner.operation)


def _figures(executable: Any) -> dict[str, Any]:
    memory = executable.get_compiled_memory_stats()
    cost = executable.cost_analysis()
    if isinstance(cost, list):
        cost = cost[0]
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
    }


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, killed kernels included."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # libtpu's own clean-up has nothing to tell, and may crash
