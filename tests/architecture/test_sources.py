"""Rules that every source file of ours keeps, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

#: All of a file's syntax tree, the module first.
Nodes = tuple[ast.AST, ...]

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (
    "baton",
    "gateway",
    "prefill_svc",
    "decode_svc",
    "worker_core",
    "engine",
    "distill",
    "kv_transfer",
    "kernels/baton_kernels",
)
TOOLS = ("bench", "examples", "models", "scripts")

#: Modules that run a stranger's code when they load data, or have no stable format.
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "joblib"})
UNSAFE_CALLS = frozenset({"eval", "exec", "compile", "__import__"})
UNSAFE_METHODS = frozenset({("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load")})


def sources(*folders: str) -> Iterator[Path]:
    """Python files that we write, without the generated ones, and those of environments that tools
    make."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if "v1" not in parts[:3] and not any(
                part == "build" or part.startswith(".venv") for part in parts
            ):
                yield path


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.partition(".")[0]


def is_restricted(call: ast.Call) -> bool:
    """torch.load(..., weights_only=True) reads tensors and plain values only."""
    return any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value
        for word in call.keywords
    )


def is_unsafe_call(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=name):
            return name in UNSAFE_CALLS
        case ast.Attribute(value=ast.Name(id=owner), attr=attr):
            return (owner, attr) in UNSAFE_METHODS
    return False


def unsafe_uses(nodes: Nodes) -> Iterator[ast.AST]:
    """What in a file loads pickles or runs text."""
    for node in nodes:
        is_import = UNSAFE_MODULES.intersection(imported(node))
        if is_import or (isinstance(node, ast.Call) and is_unsafe_call(node)):
            yield node


def nodes_in(text: str) -> Nodes:
    return tuple(ast.walk(ast.parse(text)))


@cache
def nodes_of(path: Path) -> Nodes:
    """Parsed and walked once for all rules."""
    return nodes_in(path.read_text())


def found(paths: list[Path], rule: Callable[[Nodes], Iterable[ast.AST]]) -> list[tuple[str, int]]:
    """(file, line) of each node that a rule objects to."""
    return [
        (str(path.relative_to(ROOT)), getattr(node, "lineno", 0))
        for path in paths
        for node in rule(nodes_of(path))
    ]


def of_type(kind: type[ast.AST]) -> Callable[[Nodes], list[ast.AST]]:
    return lambda nodes: [node for node in nodes if isinstance(node, kind)]


SHIPPED_FILES = list(sources(*SHIPPED))
TOOL_FILES = list(sources(*TOOLS))


def test_the_walk_finds_unsafe_uses() -> None:
    """The rules below would be worth nothing if they saw nothing."""
    guilty = "import pickle\nfrom marshal import loads\neval('1')\ntorch.load('x')\nmodel.eval()\n"
    assert [node.lineno for node in unsafe_uses(nodes_in(guilty))] == [1, 2, 3, 4]  # type: ignore[attr-defined]


def test_there_are_sources_to_walk() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in SHIPPED_FILES}
    assert folders == {folder.partition("/")[0] for folder in SHIPPED}


def test_no_pickle_and_no_eval_in_what_is_shipped() -> None:
    assert found(SHIPPED_FILES, unsafe_uses) == []


def test_tools_load_tensors_only() -> None:
    def rule(nodes: Nodes) -> Iterator[ast.AST]:
        for node in unsafe_uses(nodes):
            if not (isinstance(node, ast.Call) and is_restricted(node)):
                yield node

    assert found(TOOL_FILES, rule) == []


def test_no_assert_outside_tests() -> None:
    """Asserts vanish under -O, so that nothing may depend on them."""
    assert found(SHIPPED_FILES, of_type(ast.Assert)) == []


def test_no_global_statement() -> None:
    assert found(SHIPPED_FILES, of_type(ast.Global)) == []


def family_branches(nodes: Nodes) -> Iterator[ast.AST]:
    """Comparisons and matches of a family's name, or of config.family."""

    def is_family(node: ast.AST) -> bool:
        return (isinstance(node, ast.Name) and node.id == "family") or (
            isinstance(node, ast.Attribute) and node.attr == "family"
        )

    for node in nodes:
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.subject] if isinstance(node, ast.Match) else []
        if any(map(is_family, sides)):
            yield node


def test_the_walk_finds_branches_on_a_family() -> None:
    guilty = "if family == 'x': ...\nif config.family in y: ...\nfamily in FAMILIES.get(family)\n"
    guilty += "'x' == config.family\nmatch config.family:\n    case _: ...\n"
    assert len(list(family_branches(nodes_in(guilty)))) == 5


def test_no_branch_on_a_family() -> None:
    """Each family's particulars are in its own file."""
    assert found(list(sources("engine")), family_branches) == []


def test_every_module_says_what_it_is() -> None:
    def rule(nodes: Nodes) -> list[ast.AST]:
        module = nodes[0]
        return [] if isinstance(module, ast.Module) and ast.get_docstring(module) else [module]

    assert found(SHIPPED_FILES + TOOL_FILES, rule) == []


def test_the_folder_kernels_is_no_package() -> None:
    """A top-level package `kernels` would shadow Hugging Face's, which transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
