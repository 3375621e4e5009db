"""A small report for a bug report: machine, diagnosis, variables, installed distributions.

    python -m colabtpu doctor --bundle [FILE]

Secrets stay out: only variables about TPUs and backends are in it, those whose names look like
keys are masked, and so are passwords in addresses, tokens, and the home directory's name.
"""

import datetime
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from colabtpu import __version__
from colabtpu.doctor import Diagnosis

# Tokens of Hugging Face, GitHub, OpenAI, Google, Kaggle and JWTs; then user:password@host.
_TOKEN = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|sk-|AIza|ya29\.|eyJ|KGAT_)[\w\-.]{6,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def write(diagnosis: Diagnosis, file: Path) -> Path:
    """Writes the report.

    Args:
        diagnosis: what the doctor found.
        file: where to write it, as Markdown.

    Returns:
        The file.
    """
    file.write_text(_mask(_report(diagnosis)))
    return file


def _report(diagnosis: Diagnosis) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    plain = diagnosis.to_dict()
    environment = plain.pop("environment")
    return "\n".join(
        [
            "# colabtpu report",
            f"colabtpu {__version__}, {now}, {platform.platform()}, {os.cpu_count()} CPUs, "
            f"{_memory()} of memory",
            *("", "## Diagnosis", "```", str(diagnosis), "```"),
            *("", "## Environment", "```json", json.dumps(environment, indent=1), "```"),
            *("", "## Distributions", "```", *_distributions(), "```", ""),
        ]
    )


def _distributions() -> list[str]:
    found = {(d.metadata["Name"] or "", d.version) for d in metadata.distributions()}
    return sorted((f"{name}=={version}" for name, version in found if name), key=str.lower)


def _memory() -> str:
    try:
        total = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        total = None
    return f"{int(total[1]) / 2**20:.0f} GiB" if total else "an unknown amount"


def _mask(text: str) -> str:
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=[/\"'\s]|$)", "~", text)
    return _TOKEN.sub("***", text)
