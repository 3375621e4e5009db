"""Reads a notebook or script of other years; says line by line what is dead, and what to write.

    python -m colabtpu migrate NOTEBOOK [--write] [--json]

`--write` makes the changes that are safe, and keeps the old file beside the new one. What must
be done by hand is said and left alone. Exit status 1 when something dead is left for you.
"""

import argparse
import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colabtpu.errors import ColabTPUError, InvalidArgumentError
from colabtpu.old_code import Edit, Finding, Piece, apply, share_imports
from colabtpu.old_names import RULES
from colabtpu.old_setup import Setup

_SOURCE = "git+https://github.com/colabtpu/colabtpu"
_INSTALL = f"!pip install -q {_SOURCE}\n!python -m colabtpu install --engine tensorflow"
_PULLS_TENSORFLOW = re.compile(
    r"pip3? install .*\b(tensorflow(-cpu|-gpu|-tpu|-text)?|tf-nightly|keras[-_](nlp|hub)|keras)\b"
)


@dataclass(frozen=True)
class Migration:
    """What migration finds in one file, and what the file becomes.

    Attributes:
        file: the file that was read.
        findings: in the order of the file.
        text: the file's new content, where the safe changes have been made.
        changed: whether that differs from the old.
    """

    file: Path
    findings: tuple[Finding, ...]
    text: str
    changed: bool

    @property
    def left(self) -> tuple[Finding, ...]:
        """What is dead and must be changed by hand."""
        return tuple(f for f in self.findings if f.dead and f.by_hand)

    def __str__(self) -> str:
        safe = sum(not f.by_hand for f in self.findings)
        head = (
            f"{self.file.name}: {len(self.findings)} findings, {safe} safe to change, "
            f"{len(self.left)} dead ones for you"
        )
        return "\n".join([head, *map(_as_text, self.findings)])


def migrate(file: Path) -> Migration:
    """Reads a script or notebook and works out its migration; changes nothing.

    Args:
        file: a `.py` or `.ipynb` file.

    Returns:
        The `Migration`.

    Raises:
        InvalidArgumentError: the file cannot be read, or is neither.
        ColabTPUError: a change would leave Python that does not parse.
    """
    if file.suffix == ".ipynb":
        return _notebook(file, _read_notebook(file))
    if file.suffix == ".py":
        return _script(file, _read(file))
    raise InvalidArgumentError(
        f"`file` must end in .py or .ipynb. Received: {file}", "Pass a script or a notebook."
    )


def write(migration: Migration) -> Path:
    """Writes the new content and keeps the old one; returns the copy of the old one."""
    file = migration.file
    copy = file.with_suffix(f".old{file.suffix}")
    number = 1
    while copy.exists():
        number += 1
        copy = file.with_suffix(f".old{number}{file.suffix}")
    copy.write_bytes(file.read_bytes())
    file.write_text(migration.text)
    return copy


def _script(file: Path, text: str) -> Migration:
    pieces = [Piece(text)]
    if pieces[0].broken:
        raise InvalidArgumentError(
            f"{file} does not parse: {pieces[0].broken}.",
            "Python 2, mostly: run 2to3 on it first.",
        )
    findings = _findings(pieces)
    new = apply(text, _edits(findings, None))
    _must_parse(file, Piece(new))
    return Migration(file, findings, new, new != text)


def _notebook(file: Path, notebook: dict[str, Any]) -> Migration:
    cells = notebook["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    code = [n for n, cell in enumerate(cells) if cell["cell_type"] == "code"]
    pieces = [Piece(texts[n], n + 1) for n in code]
    findings = list(_findings(pieces))
    for n, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            findings += _prose(texts[n], n + 1)
    changed = False
    for n in code:
        new = apply(texts[n], _edits(findings, n + 1))
        if new != texts[n]:
            _must_parse(file, Piece(new, n + 1))
            cells[n] |= {"source": new.splitlines(keepends=True), "outputs": []}
            cells[n]["execution_count"] = None
            changed = True
    runtime = _runtime(notebook)
    if runtime:
        findings.append(runtime)
        notebook["metadata"]["colab"]["gpuType"] = "V5E1"
        changed = True
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    return Migration(file, tuple(sorted(findings, key=_place)), text, changed)


def _findings(pieces: list[Piece]) -> tuple[Finding, ...]:
    share_imports(pieces)
    found = Setup(pieces).findings()
    for piece in pieces:
        if piece.broken:
            what = f"This cell does not parse ({piece.broken}); it was not looked at."
            found.append(Finding(piece.cell, 1, 1, "does-not-parse", True, what, "repair it first"))
        found += _magics(piece)
        for rule in RULES:
            found += rule(piece)
    gone = [(f.cell, e) for f in found if f.code == "tpu-setup" for e in f.edits]
    kept = [f for f in found if not _inside(f, gone, pieces)]
    return tuple(sorted(kept, key=_place))


def _inside(finding: Finding, gone: list[tuple[int | None, Edit]], pieces: list[Piece]) -> bool:
    """Whether a rule found something in lines that the set-up takes away anyhow."""
    if finding.code in ("tpu-setup", "connect-first"):
        return False
    piece = next(p for p in pieces if p.cell == finding.cell)
    start = piece.line(finding.line)[0]
    end = piece.line(finding.last_line)[1]
    return any(c == finding.cell and e.start <= start and end <= e.end for c, e in gone)


def _magics(piece: Piece) -> Iterator[Finding]:
    """Notebook lines: installations that break a TPU, and magics that are gone."""
    for number, line in piece.magics.items():
        indent = " " * (len(piece.text.splitlines()[number - 1]) - len(line))
        what = instead = ""
        if _PULLS_TENSORFLOW.search(line):
            what = (
                "Stock tensorflow has no TPU kernels, and keras-nlp, keras-hub and "
                "tensorflow-text pull it in."
            )
            instead = _INSTALL.replace("\n", f"\n{indent}")
        elif line.startswith("%tensorflow_version"):
            what, instead = "That magic is gone; there is one TensorFlow.", ""
        elif re.search(r"pip3? install .*(cloud-tpu-client|torch_xla-)|env-setup\.py", line):
            what, instead = "That was for TPU Nodes.", ""
        elif line.startswith("!tensorboard"):
            what, instead = "It blocks the cell and cannot be reached.", f"%{line[1:]}"
        if what:
            new = f"{indent}{instead}\n" if instead else ""
            edit = piece.replace_lines(number, number, new)
            shown = instead.replace("\n", "; ") or "nothing: remove it"
            yield Finding(piece.cell, number, number, "notebook-line", True, what, shown, (edit,))


def _prose(text: str, cell: int) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bTPU ?v2|\bv2-8\b|\bTPU v3-8", line):
            what = "Colab's v2-8 ended in 2025; it offers v5e-1 and v6e-1."
            yield Finding(cell, number, number, "old-runtime", False, what, "v5e-1 TPU")


def _runtime(notebook: dict[str, Any]) -> Finding | None:
    wanted = notebook.get("metadata", {}).get("colab", {}).get("gpuType")
    if wanted != "V28":
        return None
    what = "The notebook asks Colab for a v2-8 TPU, which ended in 2025."
    # The change is in the metadata, not in a cell; an edit of nothing marks it as made.
    return Finding(0, 1, 1, "old-runtime", True, what, "V5E1", (Edit(0, 0, ""),))


def _edits(findings: Any, cell: int | None) -> list[Edit]:
    return [edit for f in findings if f.cell == cell for edit in f.edits]


def _place(finding: Finding) -> tuple[int, int, str]:
    return finding.cell or 0, finding.line, finding.code


def _must_parse(file: Path, piece: Piece) -> None:
    if piece.broken:
        where = f" cell {piece.cell}" if piece.cell else ""
        raise ColabTPUError(
            f"The changes would break {file.name}{where}: {piece.broken}.",
            "Please report this file; nothing was written.",
        )


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{file} cannot be read: {error}.", "Check the path.") from error


def _read_notebook(file: Path) -> dict[str, Any]:
    try:
        notebook = json.loads(_read(file))
        ast.literal_eval(str(notebook["nbformat"]))
        return notebook | {"cells": [dict(cell) for cell in notebook["cells"]]}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{file} is not a notebook of format 4: {error!r}.", "Open and save it in Jupyter."
        ) from error


def _as_text(finding: Finding) -> str:
    lines = f"line {finding.line}"
    if finding.last_line > finding.line:
        lines = f"lines {finding.line}-{finding.last_line}"
    where = lines if finding.cell is None else f"cell {finding.cell}, {lines}"
    if finding.cell == 0:
        where = "metadata"
    kind = "dead" if finding.dead else "note"
    return (
        f"\n{where}  {kind}{', by hand' if finding.by_hand else ''}  [{finding.code}]\n"
        f"    {finding.what}\n    write: {finding.instead}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("file", type=Path, metavar="NOTEBOOK", help="a .ipynb or .py file")
    parser.add_argument("--write", action="store_true", help="make the safe changes, keep a copy")
    parser.add_argument("--json", action="store_true", help="print plain data")


def run(args: argparse.Namespace) -> int:
    """Prints what is dead; exit status 1 when some of it is left for the user."""
    migration = migrate(args.file)
    copy = write(migration) if args.write and migration.changed else None
    if args.json:
        findings = [dataclasses.asdict(f) | {"by_hand": f.by_hand} for f in migration.findings]
        for finding in findings:
            del finding["edits"]
        plain = {"file": str(args.file), "findings": findings, "copy": copy and str(copy)}
        print(json.dumps(plain, indent=2))
    else:
        print(migration)
        if copy:
            print(f"\nChanged {args.file}; the old one is {copy}")
        elif any(not f.by_hand for f in migration.findings):
            print("\n--write makes the changes that are not marked `by hand`.")
    return 1 if migration.left else 0
