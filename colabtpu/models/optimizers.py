"""AdamW whose first moments take half the memory.

    model.compile(SlimAdamW(3e-4), loss=..., metrics=...)     # 10 bytes a weight, not 12

The first moments are bfloat16. The second stay float32: each step moves them by a thousandth,
which bfloat16, with its 8 bits, would round away.
"""

from typing import Any

import keras


@keras.saving.register_keras_serializable("colabtpu")
class SlimAdamW(keras.optimizers.AdamW):
    """`keras.optimizers.AdamW` with first moments of another dtype.

    Args:
        *args: as for `keras.optimizers.AdamW`.
        momentum_dtype: dtype of the first moments.
        **kwargs: as for `keras.optimizers.AdamW`.
    """

    def __init__(self, *args: Any, momentum_dtype: str = "bfloat16", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.momentum_dtype = momentum_dtype

    def add_variable(self, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        if name is not None and name.endswith("_momentum"):
            kwargs["dtype"] = self.momentum_dtype
        return super().add_variable(*args, name=name, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "momentum_dtype": self.momentum_dtype}
