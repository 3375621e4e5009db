"""The one family of errors: what is wrong, with the value, and the next step.

    raise InvalidArgumentError(
        "`per_core` must be a positive whole number. Received: per_core=0",
        "Pass 8 or more; 128 is the default.")

`except colabtpu.ColabTPUError` catches everything this package raises on purpose.
"""


class ColabTPUError(RuntimeError):
    """A failure that this package understands, together with its fix.

    Args:
        what: what is wrong, with the value that was seen.
        fix: the exact next step for the user.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\n  Next step: {fix}")
        self.what = what
        self.fix = fix


class InvalidArgumentError(ColabTPUError, ValueError):
    """An argument has a value that cannot work."""
