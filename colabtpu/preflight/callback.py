"""Explains a TPU's out-of-memory error while `fit` runs, in place of a page of HLO.

    model.fit(…, callbacks=[ct.preflight.OutOfMemory()])

A Keras callback is not told of an exception, so the callback wraps the model's train function for
the length of `fit`; the error goes on as it was, with the explanation attached as a note.
"""

import sys
from collections.abc import Callable
from typing import Any

import keras

from colabtpu.preflight.messages import OUT_OF_MEMORY, Explanation, explain


class OutOfMemory(keras.callbacks.Callback):
    """Prints what a TPU's out-of-memory error means, and lets it go on.

    Args:
        show: called with the `Explanation`; prints it if left out.

    Attributes:
        explanation: of the last such error, or `None`.
    """

    def __init__(self, show: Callable[[Explanation], None] | None = None) -> None:
        super().__init__()
        self.explanation: Explanation | None = None
        self._show = show or (lambda said: print(said, file=sys.stderr))
        self._wrapped: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        original = self.model.train_function
        if original is None or self._wrapped is not None:
            return
        self._wrapped = original

        def train_function(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception as error:
                self._explain(error)
                raise

        self.model.train_function = train_function

    def on_train_end(self, logs: Any = None) -> None:
        self._unwrap()

    def _unwrap(self) -> None:
        if self._wrapped is not None:
            self.model.train_function = self._wrapped
            self._wrapped = None

    def _explain(self, error: Exception) -> None:
        self._unwrap()
        said = explain(error)
        if said.kind == OUT_OF_MEMORY:
            self.explanation = said
            error.add_note(str(said))
            self._show(said)
