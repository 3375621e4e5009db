"""The page docs/troubleshooting.md, made from the doctor's own catalogue so that they agree.

python -m colabtpu.troubleshooting > docs/troubleshooting.md
"""

import re

from colabtpu.catalogue import ENTRIES, Entry, Symptom
from colabtpu.symptoms import GROUPS

_INTRODUCTION = """\
# Troubleshooting

This page is made from the doctor's catalogue: `python -m colabtpu.troubleshooting`. Do not edit it.

Ask the doctor first, it looks at the runtime that you have:

    python -m colabtpu doctor

In a notebook, `colabtpu.doctor.watch()` puts the explanation of a known error under its
traceback, and `colabtpu.doctor.explain(error)` gives it by hand. For a bug report,
`python -m colabtpu doctor --bundle` writes a small file without secrets.

Below: first what an error text means, then what the doctor finds before anything has failed.
Search the page for words of your error.
"""


def page() -> str:
    """Returns the page as Markdown."""
    parts = [_INTRODUCTION, "## Error texts\n"]
    for title, symptoms in GROUPS.items():
        parts += [f"### {title}\n", *map(_symptom, symptoms)]
    parts.append("## What the doctor finds\n")
    for severity, title in (("error", "Errors"), ("warning", "Warnings"), ("note", "Notes")):
        parts += [f"### {title}\n", *(_entry(e) for e in ENTRIES if e.severity == severity)]
    return "\n".join(parts)


def _symptom(symptom: Symptom) -> str:
    return (
        f"#### {_literal(symptom.shows)}\n\n{_prose(symptom.cause)}\n\n"
        f"**Next step:** {_prose(symptom.fix)}\n\n"
        f"Met in: {_prose(symptom.source)}. ({symptom.code})\n"
    )


def _entry(entry: Entry) -> str:
    engine = {"tensorflow": " On the TensorFlow engine.", "jax": " On the JAX engine.", None: ""}
    what = entry.what.replace("{seen!r}", "...").replace("{seen}", "...")
    return (
        f"#### {entry.code}\n\n{_prose(what)}{engine[entry.engine]} {_prose(entry.why)}\n\n"
        f"**Next step:** {_prose(entry.fix)}\n"
    )


def _literal(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _prose(text: str) -> str:
    """The text with Markdown's marks escaped outside of backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(\*|<(?=\w))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    print(page(), end="")
