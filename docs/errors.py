"""What the program says when an error ends it, read from its source (docs/troubleshooting.md lists it)."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import typer

from swarmnode.node import exitcodes
from swarmnode.node.control.server import EXIT_CODES as OF_REFUSALS
from swarmnode.node.control.server import REFUSALS
from swarmnode.node.process import EXIT_CODES
from swarmnode.training.worker import FOR_PEOPLE

ROOT = Path(__file__).parents[1]
ROOMS = ("cli", "crdt", "node", "package", "protocols", "training")
GAP = "…"  # what differs from case to case
ORIGINS = ("place", "source", "where")  # parameters that name the file or table of a wrong value
TEXT_AT = {"_error": 2}  # which argument is the text, where it is not the first: of the control socket's answers

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The source of the product.

    What fills a message is looked up in assignments, in lists that are appended to, in arguments, generators and
    constants, and makes several messages of it. For names and numbers, and for what is not found, GAP is left.
    """

    def __init__(self) -> None:
        self._place: dict[ast.AST, str] = {}
        self._above: dict[ast.AST, ast.AST] = {}
        self._calls: defaultdict[str, list[ast.Call]] = defaultdict(list)
        self._functions: defaultdict[str, list[Function]] = defaultdict(list)
        self._constants: defaultdict[str, list[ast.AST]] = defaultdict(list)
        self._made: dict[str, ast.expr] = {}  # the text of a class that makes its own
        self._codes: dict[str, int] = dict.fromkeys(TEXT_AT, exitcodes.ERROR)  # by class; no two have the same name
        for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
            place = path.relative_to(ROOT)
            importlib.import_module(".".join(("swarmnode", *place.with_suffix("").parts)).replace(".package.", "."))
            self._read(ast.parse(path.read_text(encoding="utf-8")), place.as_posix())
        for kind in (exitcodes.ExpectedError, *REFUSALS, *FOR_PEOPLE, *EXIT_CODES, typer.BadParameter):
            self._number(kind, {**OF_REFUSALS, **EXIT_CODES}.get(kind, exitcodes.ERROR))

    def _read(self, tree: ast.Module, place: str) -> None:
        for node in ast.walk(tree):
            self._place[node] = place
            self._above.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            if isinstance(node, Function):
                self._functions[node.name].append(node)
            elif isinstance(node, ast.Call):
                chosen = [node.func.body, node.func.orelse] if isinstance(node.func, ast.IfExp) else [node.func]
                for each in chosen:
                    self._calls[_name(each)].append(node)
                if ast.unparse(node.func) == "super().__init__" and node.args:
                    of = self._above[self._around(node)[0]]
                    if isinstance(of, ast.ClassDef) and not isinstance(node.args[0], ast.Name):
                        self._made[of.name] = node.args[0]
        for node in tree.body:
            for name, value in _bound(node):
                self._constants[name].append(value)

    def _number(self, kind: type, code: int) -> None:
        self._codes[kind.__name__] = getattr(kind, "exit_code", code)
        for each in kind.__subclasses__():
            self._number(each, code)

    def messages(self) -> Iterator[tuple[int, str, str]]:
        """The exit code, text and file of each message."""
        for kind, code in self._codes.items():
            for call in self._calls[kind]:
                said = [self._made[kind]] if kind in self._made else call.args[TEXT_AT.get(kind, 0) :][:1]
                own = "".join(_name(each.value) for each in call.keywords if each.arg == "exit_code")
                for text in self._texts(*said):
                    text = re.sub("…+", GAP, " ".join(text.replace("`", "'").split()))
                    if len(text.replace(GAP, "").split()) > 1:
                        yield getattr(exitcodes, own, code), text, self._place[call]

    def _around(self, node: ast.AST) -> list[ast.AST]:
        """What binds names around a node, the innermost first."""
        found = []
        while (node := self._above.get(node, node)) in self._above:
            if isinstance(node, Function | ast.ListComp | ast.GeneratorExp | ast.ExceptHandler):
                found.append(node)
        return found

    def _texts(self, *nodes: ast.AST, within: tuple[ast.AST, ...] = ()) -> list[str]:
        """What the expressions can be, as texts. `within`: those that were followed to here, the outermost first."""
        found: dict[str, None] = {}
        filling = any(isinstance(each, ast.JoinedStr) for each in within)
        for node in nodes:
            deeper = partial(self._texts, within=(*within, node))
            texts: list[str] = []
            match node:
                case _ if node in within:
                    pass
                case ast.Constant(value=str(text)):
                    texts = [text]
                case ast.JoinedStr(values=parts):
                    texts = _joined(*(_told(deeper(each)) for each in parts))
                case ast.FormattedValue(value=one) | ast.NamedExpr(value=one) | ast.Starred(value=one):
                    texts = deeper(one)
                case ast.ListComp(elt=one) | ast.GeneratorExp(elt=one):
                    texts = deeper(one)
                case ast.BinOp(left=left, op=ast.Add(), right=right):
                    texts = _joined(deeper(left), deeper(right))
                case ast.IfExp(body=one, orelse=other):
                    texts = deeper(one, other)
                case ast.BoolOp(values=several) | ast.List(elts=several) | ast.Tuple(elts=several):
                    texts = deeper(*several)
                case ast.Name():
                    texts = deeper(*self._values(node, within))
                case ast.Call(func=ast.Name(id="installing"), args=[one]):
                    texts = [_installing(each) for each in deeper(one)]
                case ast.Call(func=ast.Name(id="str"), args=[ast.Name() as one]) if not filling:
                    texts = deeper(*self._caught(one))
                case ast.Call(func=ast.Name(id="next"), args=[one, _]):
                    texts = deeper(one)
                case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[one]):
                    if between.startswith("\n"):
                        texts = [] if filling else deeper(one)
                    elif isinstance(one, ast.List):
                        texts = _joined(*map(deeper, one.elts), between=between)
                case ast.Call(func=called) if isinstance(called, ast.Name) or not filling:
                    texts = deeper(*self._given(node))
            found.update(dict.fromkeys(texts or [GAP]))
        return list(found)

    def _values(self, name: ast.Name, within: tuple[ast.AST, ...]) -> list[ast.AST]:
        """What the variable may be, as expressions."""
        for around in self._around(name):
            if found := [value for node in ast.walk(around) for key, value in _bound(node) if key == name.id]:
                return found
            if isinstance(around, Function):
                for each in (*around.args.args, *around.args.kwonlyargs):
                    if each.arg == name.id:
                        return self._passed(each, around, within)
        return self._known(self._constants[name.id], name)

    def _passed(self, parameter: ast.arg, function: Function, within: tuple[ast.AST, ...]) -> list[ast.AST]:
        """The texts that a function, or the class of an `__init__`, is called with; if a call led here, by that one."""
        if parameter.arg in ORIGINS or parameter.annotation is None or ast.unparse(parameter.annotation) != "str":
            return []
        names = [each.arg for each in function.args.args if each.arg != "self"]
        of = self._above[function]
        called = of.name if isinstance(of, ast.ClassDef) and function.name == "__init__" else function.name
        calls = [each for each in within if isinstance(each, ast.Call) and _name(each.func) == called]
        found: list[ast.AST] = []
        for call in calls or self._calls[called]:
            if called != function.name or function in self._known(self._functions[called], call):
                given = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords}
                found += [given[parameter.arg]] if parameter.arg in given else []
        return found

    def _given(self, call: ast.Call) -> list[ast.AST]:
        """What a function returns or yields."""
        ends = ast.Return | ast.Yield | ast.YieldFrom
        every = [each for of in self._known(self._functions[_name(call.func)], call) for each in ast.walk(of)]
        return [each.value for each in every if isinstance(each, ends) and each.value is not None]

    def _caught(self, error: ast.Name) -> list[ast.AST]:
        """The texts of what is raised by the functions that are called where the error is caught."""
        for around in self._around(error):
            if isinstance(around, ast.ExceptHandler) and around.name == error.id:
                tried = [each for line in self._above[around].body for each in ast.walk(line)]
                called = [each for each in tried if isinstance(each, ast.Call)]
                functions = [of for each in called for of in self._known(self._functions[_name(each.func)], each)]
                kinds = {_name(each) for each in ast.walk(around.type) if isinstance(each, ast.Name | ast.Attribute)}
                raised = [each.exc for of in functions for each in ast.walk(of) if isinstance(each, ast.Raise)]
                calls = [each for each in raised if isinstance(each, ast.Call) and _name(each.func) in kinds]
                return [each.args[0] for each in calls if each.args and _name(each.func) not in self._codes]
        return []

    def _known(self, found: list[ast.AST], user: ast.AST) -> list[ast.AST]:
        """Of what has the name that is used: what is in the same file, or the only one."""
        if isinstance(user, ast.Call) and isinstance(user.func, ast.Name):  # which is no method
            found = [each for each in found if not isinstance(self._above[each], ast.ClassDef)]
        here = [each for each in found if self._place[each] == self._place[user]]
        return here or (found if len(found) == 1 else [])


def _told(texts: list[str]) -> list[str]:
    """Of what a part of a message can be, what is told: words. What differs and has one word is a name."""
    if len(texts) == 1:
        return texts
    told = dict.fromkeys(each if not each or len(re.findall("[A-Za-z]+", each)) > 1 else GAP for each in texts)
    return list(told) if told.keys() - {"", GAP} else [GAP]


def _name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The variable that a node gives a value, or as a list an item, or which goes through its items."""
    match node:
        case ast.Assign(targets=[ast.Name() as name], value=value) | ast.NamedExpr(target=name, value=value):
            yield name.id, value
        case ast.Call(func=ast.Attribute(value=ast.Name() as name, attr="append"), args=[value]):
            yield name.id, value
        case ast.For(target=ast.Name() as name, iter=value) | ast.comprehension(target=ast.Name() as name, iter=value):
            yield name.id, value


def _joined(*parts: list[str], between: str = "") -> list[str]:
    return [between.join(each) for each in itertools.product(*parts)]


def _installing(package: str) -> str:
    """The command by which a checkout's environment gets the package: `installing` tells that of whichever it is in."""
    if package.startswith("swarmnode["):
        return f"pip install --constraint constraints.txt -e '{package.replace('swarmnode', '.', 1)}'"
    return f'pip install "{package}"'
