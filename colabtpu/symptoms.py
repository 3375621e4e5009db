"""What an error means, and what to do: looks its text up among the texts that people meet on TPUs.

    from colabtpu import doctor
    doctor.explain(error)                    # cause and fix, or None
    doctor.watch()                           # in a notebook: under every traceback from now on

`docs/troubleshooting.md` is made from the same table by troubleshooting.py.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from colabtpu.catalogue import Symptom
from colabtpu.connecting_symptoms import CONNECTING, OLD_CODE, VERSIONS
from colabtpu.errors import ColabTPUError
from colabtpu.training_symptoms import COMPILING, INPUT, MEMORY, STRATEGIES, TENSORBOARD

GROUPS: dict[str, tuple[Symptom, ...]] = {
    "Connecting to the TPU": CONNECTING,
    "Versions and wheels": VERSIONS,
    "Compiling and shapes": COMPILING,
    "Memory": MEMORY,
    "Strategies": STRATEGIES,
    "Input and files": INPUT,
    "Code of other years": OLD_CODE,
    "TensorBoard and the profiler": TENSORBOARD,
}
SYMPTOMS = tuple(symptom for group in GROUPS.values() for symptom in group)


@dataclass(frozen=True)
class Explanation:
    """What an error means: its code in the catalogue, the cause, the exact next step."""

    code: str
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"colabtpu: {self.cause}\n  Next step: {self.fix}  [{self.code}]"


def explain(error: BaseException | str) -> Explanation | None:
    """Says what an error means, if it is one that is known.

    Args:
        error: the exception, whose causes are looked at as well, or a text such as the last
            lines of a process that died.

    Returns:
        The `Explanation`, or `None` for an error that is not known or that explains itself.
    """
    for text, files in _texts(error):
        for symptom in SYMPTOMS:
            if not re.search(symptom.pattern, text, re.DOTALL):
                continue
            if symptom.frames is None or re.search(symptom.frames, files):
                return Explanation(symptom.code, symptom.cause, symptom.fix)
    return None


def watch(shell: Any = None) -> bool:
    """Puts the explanation under every traceback of this notebook, where there is one.

    An error that is not known is shown as it is, and what others have hooked in before still
    runs. A second call changes nothing.

    Args:
        shell: the IPython shell; the running one if left out.

    Returns:
        Whether there is a notebook to watch.
    """
    if shell is None:
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return False
    if not getattr(shell.CustomTB, "_colabtpu", False):
        shell.set_custom_exc((Exception,), _handler(shell.custom_exceptions, shell.CustomTB))
        # set_custom_exc wraps the handler, so the mark goes on what the shell will call.
        shell.CustomTB.__func__._colabtpu = True
    return True


def _texts(error: BaseException | str) -> Iterator[tuple[str, str]]:
    """The error's text and the files of its traceback, then those of its causes."""
    if isinstance(error, str):
        yield error, error
        return
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, ColabTPUError):
            return
        seen.add(id(link))
        files = "\n".join(frame.filename for frame in traceback.extract_tb(link.__traceback__))
        yield f"{type(link).__name__}: {link}", files
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _handler(earlier: tuple[type, ...], custom: Callable[..., Any]) -> Callable[..., Any]:
    def handle(
        shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: Any = None
    ) -> Any:
        explanation = explain(error)
        if explanation:
            error.add_note(f"\n{explanation}")
        if earlier and issubclass(kind, earlier):
            shown = custom(kind, error, trace, tb_offset=tb_offset)
        else:
            shown = shell.showtraceback(
                (kind, error, trace), tb_offset=tb_offset, running_compiled_code=_runs(trace)
            )
        if explanation and not _shows_notes(shell):
            print(f"\n{explanation}", file=sys.stderr)
        return shown

    return handle


def _runs(trace: Any) -> bool:
    """Whether the cell was running, rather than being compiled: IPython shows the two apart."""
    files = [frame.filename for frame in traceback.extract_tb(trace)]
    return not (files and files[-1].endswith("compilerop.py"))


def _shows_notes(shell: Any) -> bool:
    """Whether this IPython prints an exception's notes; Colab's 7.34 does not."""
    probe = ValueError("probe")
    probe.add_note("a-note")
    lines = shell.InteractiveTB.structured_traceback(ValueError, probe, None)
    return any("a-note" in line for line in lines)
