"""A piece of Python as migration sees it: its text, its tree, places in it, and changes to it.

Notebook lines such as `!pip` and `%magic` are not Python; they are hidden from the parser and
kept in the text, so that line numbers stay what the reader sees.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_MAGIC = re.compile(r"^(\s*)([!%?].*)$")


@dataclass(frozen=True)
class Edit:
    """Replace the characters from `start` to `end` by `new`."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Finding:
    """One thing in old code that is dead, or works and should be known about.

    Attributes:
        cell: the notebook cell, counted from 1; `None` in a script.
        line: the first line, counted from 1 within the cell or script.
        last_line: the last line.
        code: the short name of the rule.
        dead: `True` where it no longer works, `False` where it does, with a drawback.
        what: what is wrong.
        instead: what to write.
        edits: the changes that do it; none where it must be done by hand.
    """

    cell: int | None
    line: int
    last_line: int
    code: str
    dead: bool
    what: str
    instead: str
    edits: tuple[Edit, ...] = field(default=(), repr=False)

    @property
    def by_hand(self) -> bool:
        """Whether `--write` leaves it alone."""
        return not self.edits


class Piece:
    """One script, or one code cell of a notebook.

    Attributes:
        text: the source.
        cell: the cell's number, `None` for a script.
        tree: the parsed source; empty where it does not parse.
        broken: why it does not parse, else `None`.
        magics: line number -> the notebook line, without its indentation.
        imported: name -> the module it was imported from, over all pieces of the program.
    """

    def __init__(self, text: str, cell: int | None = None) -> None:
        self.text = text
        self.cell = cell
        self.magics: dict[int, str] = {}
        self.imported: dict[str, str] = {}
        self.broken: str | None = None
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        try:
            self.tree = ast.parse(self._python())
        except SyntaxError as error:
            self.tree, self.broken = ast.parse(""), f"{error.msg} in line {error.lineno}"

    def start(self, node: ast.AST) -> int:
        """Returns where `node` begins, in characters."""
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Returns where `node` ends, in characters."""
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def source(self, node: ast.AST) -> str:
        """Returns the text of `node`."""
        return self.text[self.start(node) : self.end(node)]

    def line(self, number: int) -> tuple[int, int]:
        """Returns where line `number` begins and ends, its line break included."""
        return self._starts[number - 1], self._starts[number]

    def replace(self, node: ast.AST, new: str) -> Edit:
        """Returns the change of `node` into `new`."""
        return Edit(self.start(node), self.end(node), new)

    def replace_lines(self, first: int, last: int, new: str) -> Edit:
        """Returns the change of whole lines into `new`; `""` removes them."""
        return Edit(self._starts[first - 1], self._starts[last], new)

    def remove_argument(self, call: ast.Call, keyword: ast.keyword) -> Edit:
        """Returns the removal of one keyword argument, its comma included."""
        arguments = sorted([*call.args, *call.keywords], key=self.start)
        place = arguments.index(keyword)
        if place:
            return Edit(self.end(arguments[place - 1]), self.end(keyword), "")
        if len(arguments) > 1:
            return Edit(self.start(keyword), self.start(arguments[1]), "")
        return Edit(self.start(keyword), self.end(keyword), "")

    def found(
        self, node: ast.AST, code: str, what: str, instead: str, *edits: Edit, dead: bool = True
    ) -> Finding:
        """Returns a finding at the lines of `node`."""
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        return Finding(self.cell, first, last, code, dead, what, instead, edits)

    def _offset(self, line: int, column_bytes: int) -> int:
        """`ast` counts columns in bytes of UTF-8."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return self._starts[line - 1] + len(text.encode()[:column_bytes].decode(errors="ignore"))

    def _python(self) -> str:
        if self.text.startswith("%%") and not re.match(r"%%(time|capture|timeit)\b", self.text):
            self.magics[1] = self.text
            return "\n" * self.text.count("\n")
        inside = _lines_inside_strings(self.text)
        python = []
        for number, line in enumerate(self._lines, 1):
            magic = _MAGIC.match(line)
            if magic and number not in inside and not _continues(self._lines, number):
                self.magics[number] = magic[2].rstrip("\n")
                line = f"{magic[1]}pass\n"
            python.append(line)
        return "".join(python)


def apply(text: str, edits: list[Edit]) -> str:
    """Returns `text` with the changes made; a change inside a larger one is left out."""
    chosen: list[Edit] = []
    for edit in sorted(set(edits), key=lambda e: (e.start - e.end, e.start)):
        if all(edit.end <= c.start or edit.start >= c.end for c in chosen):
            chosen.append(edit)
    for edit in sorted(chosen, key=lambda e: e.start, reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def share_imports(pieces: list[Piece]) -> None:
    """Tells every piece which names the program imports from where."""
    imported = {
        alias.asname or alias.name: node.module or ""
        for piece in pieces
        for node in ast.walk(piece.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for piece in pieces:
        piece.imported = imported


def dotted(node: ast.AST) -> str:
    """Returns a name such as `tf.keras.optimizers.Adam`; `""` for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yields every call with the name it calls; for `f().g()` that name is `.g`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if not name and isinstance(node.func, ast.Attribute):
                name = f".{node.func.attr}"
            yield name, node


def argument(call: ast.Call, name: str) -> ast.keyword | None:
    """Returns the keyword argument called `name`."""
    return next((k for k in call.keywords if k.arg == name), None)


def literal(node: ast.AST | None) -> object:
    """Returns the value of a constant, else `None`."""
    return node.value if isinstance(node, ast.Constant) else None


def _lines_inside_strings(text: str) -> set[int]:
    """Lines that lie inside a triple-quoted string, told by counting the quotes."""
    inside: set[int] = set()
    quote = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:
            inside.add(number)
        for mark in re.findall(r'"""|\'\'\'', line.partition("#")[0] if not quote else line):
            quote = "" if mark == quote else quote or mark
    return inside


def _continues(lines: list[str], number: int) -> bool:
    """Whether line `number` goes on with the line before: then `%` is an operator."""
    before = lines[number - 2].rstrip() if number > 1 else ""
    return before.endswith(("\\", "(", "[", "{", ","))
