"""Writes the repository's address from pyproject.toml into badges and install cells.

    python tools/stamp.py            # rewrites README.md and notebooks/*.ipynb
    python tools/stamp.py --check    # changes nothing, fails where something is out of date

The address stands in `[project.urls] Repository` alone; everything else derives from it.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Any address of this shape before `/blob/...notebooks/` or after `git+` is ours.
_BADGE = re.compile(r"https://colab\.research\.google\.com/github/[\w.-]+/[\w.-]+/blob/main/")
_SOURCE = re.compile(r"git\+https://[\w.-]+/[\w.-]+/[\w.-]+")


def address() -> str:
    """The repository's public address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def stamped(text: str) -> str:
    """`text` with every badge and install source pointing at `address()`."""
    owner_and_name = address().removeprefix("https://github.com/")
    badge = f"https://colab.research.google.com/github/{owner_and_name}/blob/main/"
    return _SOURCE.sub(f"git+{address()}", _BADGE.sub(badge, text))


def main() -> int:
    """Rewrites, or with `--check` lists, the files that are out of date."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]:
        text = path.read_text()
        if stamped(text) != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(stamped(text))
    print("\n".join(f"stale: {name}" for name in stale) or "every address is up to date")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
