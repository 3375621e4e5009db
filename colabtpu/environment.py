"""Where am I: the platform, the accelerator, the installed builds. Imports no ML framework.

python -m colabtpu doctor          # prints it
"""

from dataclasses import dataclass

from colabtpu.chips import Chip


@dataclass(frozen=True)
class Environment:
    """What can be known about this process's surroundings without importing a framework.

    Attributes:
        platform: `"colab"`, `"kaggle"`, `"cloud_tpu_vm"` or `"machine"`.
        accelerator: `"tpu"`, `"gpu"` or `"cpu"`, the best that is attached.
        chip: the TPU generation, `None` without a TPU or where it is unknown.
        num_chips: TPU chips on this host, 0 without a TPU.
        evidence: how each of the above is known, such as `"TPU_ACCELERATOR_TYPE=v5e-1"`.
        python: the Python version, such as `"3.13.15"`.
        builds: distribution name -> version, for the builds that matter and are installed.
        imported: which of tensorflow, jax, keras, torch this process has imported already.
        variables: the variables about TPUs and backends that are set, with their values.
    """

    platform: str
    accelerator: str
    chip: Chip | None
    num_chips: int
    evidence: tuple[str, ...]
    python: str
    builds: dict[str, str]
    imported: frozenset[str]
    variables: dict[str, str]
