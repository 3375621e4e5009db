"""Lets a button be pressed while a cell runs.

    process_messages()          # call it between steps, from the thread that runs the cell

A kernel handles one message at a time, and a running cell is one; a click waits until the cell
ends. ipykernel 7 hands clicks to a thread of their own when the page asks for that. Before it
(Colab has 6.17) the waiting messages can be looked through here: clicks are handled, everything
else stays in its place.
"""

import json
import sys
from typing import Any

_DELIMITER = b"<IDS|MSG>"


def process_messages() -> None:
    """Handles the widget messages that wait, where this kernel needs it; else does nothing."""
    kernel = _kernel()
    if kernel is None:
        return
    kernel.shell_stream.flush()
    waiting = []
    while not kernel.msg_queue.empty():
        waiting.append(kernel.msg_queue.get_nowait())
    for item in waiting:
        if not _handle(kernel, item):
            kernel.msg_queue.put_nowait(item)


def _kernel() -> Any:
    """The running kernel, `None` where there is none or it does this by itself."""
    if "IPython" not in sys.modules:
        return None
    kernel: Any = getattr(sys.modules["IPython"].get_ipython(), "kernel", None)
    # ipykernel 7 has no such queue; its clicks come by another thread.
    if not hasattr(kernel, "msg_queue") or not hasattr(kernel.shell_stream, "flush"):
        return None
    return kernel


def _handle(kernel: Any, item: Any) -> bool:
    """Handles `item` if it is a widget's message; returns whether it was."""
    _, _, args = item
    if not args or _kind(args[0]) != "comm_msg":
        return False
    identities, frames = kernel.session.feed_identities(args[0], copy=False)
    message = kernel.session.deserialize(frames, content=True, copy=False)
    kernel.shell_handlers["comm_msg"](kernel.shell_stream, identities, message)
    return True


def _kind(frames: Any) -> str:
    """The message type, read without taking the message: its signature can be used only once."""
    parts = [bytes(getattr(frame, "bytes", frame)) for frame in frames]
    if _DELIMITER not in parts:
        return ""
    header = parts[parts.index(_DELIMITER) + 2]
    return str(json.loads(header).get("msg_type", ""))
