"""The TPU set-up of old notebooks: resolver, connect, initialise, strategy, in all their dialects.

All of it comes down to two lines: `connection = colabtpu.connect(...)` before TensorFlow is
imported, and `strategy = connection.strategy` where the strategy was made.
"""

import ast
import re
from collections.abc import Iterator

from colabtpu.old_code import Edit, Finding, Piece, calls, dotted, literal

HEADER = 'import colabtpu\n\n{name} = colabtpu.connect(engine="tensorflow")\n'

_RESOLVER = re.compile(r"TPUClusterResolver(\.connect)?$")
_STRATEGY = re.compile(r"(TPUStrategy|TPUDistributionStrategy|TPUStrategyV2)$")
_PREPARE = re.compile(
    r"(experimental_connect_to_(cluster|host)|initialize_tpu_system|initialize_system"
    r"|setup_tpu|shutdown_tpu_system)$"
)
_FALLBACK = re.compile(r"(get_strategy|MirroredStrategy|OneDeviceStrategy)$")
_ADDRESS = ("COLAB_TPU_ADDR", "XRT_TPU_CONFIG")
_DEVICE_LIST = re.compile(r"list_(physical|logical)_devices$")
_FRAMEWORKS = (
    "tensorflow", "keras", "keras_nlp", "keras_hub", "transformers", "official",
    "tensorflow_hub", "tensorflow_text", "tensorflow_datasets", "tensorflow_addons",
)  # fmt: skip

# What each call of the set-up was for, and why it is gone.
_WHY = (
    ("keras_to_tpu_model", "keras_to_tpu_model ended with TensorFlow 1: a model becomes a TPU "
     "model by being made inside the connection's scope."),
    ("COLAB_TPU_ADDR", "COLAB_TPU_ADDR was the address of a TPU Node; Colab ended those in 2024."),
    ("TPUClusterResolver", "TPUClusterResolver without tpu='local' looks for a TPU Node; today's "
     "TPU is attached to this machine."),
    ("experimental_connect_to_host", "experimental_connect_to_host never worked for a TPU."),
    ("experimental_connect_to_cluster", "An attached TPU needs no connecting."),
    ("initialize_tpu_system", "connect() initialises the TPU, once; without a TPU this call ends "
     "in an error, or kills the process."),
    ("initialize_system", "connect() initialises the TPU, once."),
    ("setup_tpu", "jax.tools.colab_tpu.setup_tpu() was for TPU Nodes; JAX finds the attached TPU."),
    ("TPUStrategy", "connect() makes the strategy that fits the device that is there."),
    ("TPUDistributionStrategy", "tf.contrib ended with TensorFlow 1."),
)  # fmt: skip


class Setup:
    """What of a program is TPU set-up, over all its pieces."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.resolvers: set[str] = set()
        self.addresses: set[str] = set()
        self.strategies: set[str] = set()
        self.models: list[tuple[Piece, ast.stmt, str]] = []  # keras_to_tpu_model(net): "net"
        for piece in pieces:
            self._collect(piece)
        names = {n.id for p in pieces for n in ast.walk(p.tree) if isinstance(n, ast.Name)}
        self.connection = next(
            name for name in ("connection", "tpu_connection", "ct_connection") if name not in names
        )

    def findings(self) -> list[Finding]:
        """Returns a finding for each part of the set-up, with the changes that replace it."""
        found: list[Finding] = []
        for piece in self.pieces:
            for body in _bodies(piece.tree):
                found += self._in_body(piece, body)
            found += self._device_lists(piece)
        found = [f for f in found if not any(_is_within(f, other) for other in found)]
        left = self._left_over(found)
        if left:
            # A name of the old set-up is used elsewhere: changing half of it would break the rest.
            return [_without_edits(finding) for finding in found] + left
        return found + self._scope() + self._header(found)

    def _collect(self, piece: Piece) -> None:
        for node in ast.walk(piece.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            name, value = node.targets[0].id, node.value
            outer = dotted(value.func) if isinstance(value, ast.Call) else ""
            if outer.endswith("keras_to_tpu_model"):
                model = piece.source(value.args[0]) if value.args else ""  # type: ignore[attr-defined]
                self.models.append((piece, node, model))
            elif _calls(value, _STRATEGY):
                self.strategies.add(name)
            elif _calls(value, _RESOLVER):
                self.resolvers.add(name)
            elif _mentions_address(value):
                self.addresses.add(name)

    def _in_body(self, piece: Piece, body: list[ast.stmt]) -> Iterator[Finding]:
        gone = [s for s in body if self._is_setup(s)]
        for statement in gone:
            indent = " " * statement.col_offset
            model = next((m for p, s, m in self.models if s is statement), None)
            assigned = sorted(self.strategies & _assigned(statement))
            if model is not None:
                lines = [f"{_assigned(statement).pop()} = {model}"]
            else:
                lines = [f"{name} = {self.connection}.strategy" for name in assigned]
            if not lines and len(gone) == len(body) and body is not piece.tree.body:
                lines = ["pass"] if statement is gone[-1] else []
            new = "".join(f"{indent}{line}\n" for line in lines)
            alone = _stands_alone(statement, body)
            edit = piece.replace_lines(statement.lineno, statement.end_lineno or 0, new)
            yield piece.found(
                statement,
                "tpu-setup",
                _why(piece.source(statement)),
                "; ".join(lines) if lines and lines != ["pass"] else "nothing: remove it",
                *([edit] * alone),
            )

    def _device_lists(self, piece: Piece) -> Iterator[Finding]:
        """Detection by the list of devices, which lists a TPU wherever libtpu is installed."""
        for name, call in calls(piece.tree):
            listed = literal(call.args[0]) if call.args else None
            if _DEVICE_LIST.search(name) and listed in ("TPU", "TPU_SYSTEM"):
                what = (
                    f"{listed} is in that list wherever libtpu loads, chip or no chip, and never "
                    "with stock TensorFlow."
                )
                new = f'[d for d in {self.connection}.devices if {self.connection}.device == "tpu"]'
                yield piece.found(call, "tpu-device-list", what, new, piece.replace(call, new))

    def _is_setup(self, statement: ast.stmt) -> bool:
        """Whether the whole statement is set-up; one that also does other work is not."""
        if any(s is statement for _, s, _ in self.models):
            return True
        if isinstance(statement, (ast.If, ast.Try, ast.With, ast.While)):
            inner = [s for body in _bodies(statement) for s in body]
            return self._touches(statement) and all(self._is_setup(s) or _is_idle(s) for s in inner)
        if isinstance(statement, (ast.Assign, ast.Expr, ast.Assert, ast.AnnAssign)):
            if self._touches(statement):
                return True
            return _is_print(statement) and bool(
                _names(statement) & (self.resolvers | self.addresses)
            )
        return False

    def _touches(self, node: ast.AST) -> bool:
        if any(_calls(node, rule) for rule in (_RESOLVER, _STRATEGY, _PREPARE)):
            return True
        if _mentions_address(node):
            return True
        test = getattr(node, "test", None)
        return test is not None and bool(_names(test) & self.resolvers)

    def _left_over(self, found: list[Finding]) -> list[Finding]:
        """Set-up amid other work, and uses of the resolver or the address outside of it."""
        left = []
        gone = (self.resolvers | self.addresses) - self.strategies
        for piece in self.pieces:
            removed = [f.edits[0] for f in found if f.cell == piece.cell and f.edits]

            def stays(node: ast.AST, piece: Piece = piece, removed: list[Edit] = removed) -> bool:
                return not any(e.start <= piece.start(node) < e.end for e in removed)

            instead = f"what {self.connection} offers: .strategy, .scope(), .device, .num_cores"
            for node in ast.walk(piece.tree):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    if node.id in gone and stays(node):
                        what = f"`{node.id}` belongs to the old set-up and is used here as well."
                        left.append(piece.found(node, "tpu-setup-used-elsewhere", what, instead))
                elif isinstance(node, ast.Call) and _is_setup_call(node) and stays(node):
                    what = _why(piece.source(node))
                    left.append(piece.found(node, "tpu-setup-amid-other-work", what, instead))
        return left

    def _scope(self) -> list[Finding]:
        """Puts a model that keras_to_tpu_model took into the connection's scope."""
        found = []
        for piece, statement, model in self.models:
            body = next(b for b in _bodies(piece.tree) if statement in b)
            made = [s for s in body if model in _assigned(s) and s.lineno < statement.lineno]
            if not made:
                continue
            inside = body[body.index(made[-1]) : body.index(statement)]
            first, last = inside[0].lineno, inside[-1].end_lineno or 0
            what = f"`{model}` is made outside of the strategy's scope."
            instead = f"with {self.connection}.scope(): around lines {first} to {last}"
            opening = f"{' ' * inside[0].col_offset}with {self.connection}.scope():\n"
            edits = () if _has_long_string(inside) else _indented(piece, first, last, opening)
            found.append(
                Finding(piece.cell, first, last, "model-outside-scope", True, what, instead, edits)
            )
        return found

    def _header(self, found: list[Finding]) -> list[Finding]:
        """Connects before the first import of a framework, because variables are set there."""
        statements = [(p, s) for p in self.pieces for s in p.tree.body]
        if not found or not statements:
            return []
        importing = [(p, s) for p, s in statements if _imports_framework(s)]
        piece, statement = (importing or statements)[0]
        at = piece.line(statement.lineno)[0]
        new = HEADER.format(name=self.connection)
        what = "The variables that open a TPU are read when TensorFlow is imported."
        instead = new.replace("\n\n", "; ").strip()
        return [piece.found(statement, "connect-first", what, instead, Edit(at, at, f"{new}\n"))]


def _indented(piece: Piece, first: int, last: int, opening: str) -> tuple[Edit, ...]:
    """Indents whole lines by four and puts `opening` before them."""
    starts = [piece.line(number) for number in range(first, last + 1)]
    filled = [start for start, end in starts if piece.text[start:end].strip()]
    return tuple(
        Edit(start, start, opening + "    " if start == filled[0] else "    ") for start in filled
    )


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements in `tree`, that of `tree` itself first."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def _stands_alone(statement: ast.stmt, body: list[ast.stmt]) -> bool:
    """Whether no other statement shares its lines, as one after a semicolon would."""
    return not any(
        s is not statement
        and s.lineno <= (statement.end_lineno or 0)
        and (s.end_lineno or 0) >= statement.lineno
        for s in body
    )


def _calls(node: ast.AST, rule: re.Pattern[str]) -> bool:
    return any(rule.search(name) for name, _ in calls(node))


def _is_setup_call(call: ast.Call) -> bool:
    return any(rule.search(dotted(call.func)) for rule in (_RESOLVER, _STRATEGY, _PREPARE))


def _is_within(finding: Finding, other: Finding) -> bool:
    """Whether a part of the set-up lies inside a larger one, which says it all."""
    lines = (finding.line, finding.last_line)
    return (
        finding.cell == other.cell
        and other.code == "tpu-setup"
        and lines != (other.line, other.last_line)
        and other.line <= lines[0]
        and lines[1] <= other.last_line
    )


def _mentions_address(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Constant) and n.value in _ADDRESS for n in ast.walk(node))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _assigned(statement: ast.stmt) -> set[str]:
    return {
        n.id
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _is_print(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and dotted(statement.value.func) in ("print", "pprint", "pprint.pprint", "display")
    )


def _is_idle(statement: ast.stmt) -> bool:
    """Whether a statement inside a set-up block does no work of its own."""
    if isinstance(statement, (ast.Pass, ast.Raise)) or _is_print(statement):
        return True
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Constant) or _calls(statement.value, _FALLBACK)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _has_long_string(statements: list[ast.stmt]) -> bool:
    """Whether a string runs over several lines: indenting the block would change it."""
    return any(
        isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno
        for statement in statements
        for node in ast.walk(statement)
    )


def _imports_framework(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        modules = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom):
        modules = [statement.module or ""]
    else:
        return False
    return any(module.partition(".")[0] in _FRAMEWORKS for module in modules)


def _without_edits(finding: Finding) -> Finding:
    return Finding(
        finding.cell,
        finding.line,
        finding.last_line,
        finding.code,
        finding.dead,
        finding.what,
        finding.instead,
    )


def _why(source: str) -> str:
    return " ".join(why for word, why in _WHY if word in source) or "Part of the old TPU set-up."
