"""The rules of the house: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
MOST_LINES = 400

# A layer may import itself and what is named here; a module belongs to the longest name that begins it.
LAYERS: dict[str, set[str]] = {
    "ckpttool.errors": set(),
    "ckpttool.crew": set(),
    "ckpttool.environment": set(),
    "ckpttool.telling": set(),
    "ckpttool.tensors": set(),
    "ckpttool.opcodes": {"ckpttool.errors"},
    "ckpttool.unpickle": {"ckpttool.opcodes", "ckpttool.errors"},
    "ckpttool.records": {"ckpttool.unpickle", "ckpttool.tensors", "ckpttool.errors"},
    "ckpttool.formats": {
        *("ckpttool.records", "ckpttool.unpickle", "ckpttool.opcodes", "ckpttool.tensors", "ckpttool.errors"),
        "ckpttool.telling",
    },
    "ckpttool.elements": {"ckpttool.tensors"},
    "ckpttool.reading": {"ckpttool.elements", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"},
    "ckpttool.lowrank": {"ckpttool.tensors"},
    "ckpttool.fusing": {
        *("ckpttool.lowrank", "ckpttool.reading", "ckpttool.elements", "ckpttool.tensors", "ckpttool.errors"),
    },
    "ckpttool.plan": {"ckpttool.lowrank", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"},
    "ckpttool.gathering": {
        *("ckpttool.plan", "ckpttool.fusing", "ckpttool.lowrank", "ckpttool.reading", "ckpttool.elements"),
        "ckpttool.tensors",
    },
    "ckpttool.staging": {"ckpttool.errors"},
    "ckpttool.wholefile": {"ckpttool.staging", "ckpttool.errors"},
    "ckpttool.sink": {
        *("ckpttool.staging", "ckpttool.gathering", "ckpttool.plan", "ckpttool.lowrank", "ckpttool.reading"),
        *("ckpttool.elements", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"),
    },
    "ckpttool.layout": {"ckpttool.tensors", "ckpttool.errors"},
    "ckpttool.adapters": {
        *("ckpttool.lowrank", "ckpttool.layout", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"),
    },
    "ckpttool.naming": {"ckpttool.plan", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"},
    "ckpttool.export": {
        *("ckpttool.naming", "ckpttool.sink", "ckpttool.staging", "ckpttool.plan", "ckpttool.reading"),
        *("ckpttool.elements", "ckpttool.layout", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"),
        "ckpttool.unpickle",  # to pause the collector
    },
    "ckpttool.architectures": {"ckpttool.plan", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"},
    "ckpttool.source": {"ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"},
    "ckpttool.inspection": {
        *("ckpttool.source", "ckpttool.adapters", "ckpttool.formats", "ckpttool.layout", "ckpttool.tensors"),
        "ckpttool.errors",
        "ckpttool.unpickle",  # to pause the collector
        "ckpttool.telling",
    },
    "ckpttool.migration": {"ckpttool.inspection", "ckpttool.formats", "ckpttool.layout", "ckpttool.errors"},
    "ckpttool.merging": {
        *(
            "ckpttool.adapters",
            "ckpttool.naming",
            "ckpttool.lowrank",
            "ckpttool.inspection",
            "ckpttool.export",
            "ckpttool.sink",
            "ckpttool.staging",
            "ckpttool.plan",
        ),
        *("ckpttool.reading", "ckpttool.elements", "ckpttool.layout", "ckpttool.formats", "ckpttool.tensors"),
        *("ckpttool.errors", "ckpttool.telling"),
    },
    "ckpttool.converting": {
        *("ckpttool.architectures", "ckpttool.inspection", "ckpttool.export", "ckpttool.naming", "ckpttool.staging"),
        *("ckpttool.adapters", "ckpttool.lowrank"),
        *(
            "ckpttool.plan",
            "ckpttool.reading",
            "ckpttool.layout",
            "ckpttool.formats",
            "ckpttool.tensors",
            "ckpttool.errors",
        ),
        "ckpttool.unpickle",  # for the arguments of a run
    },
    "ckpttool.comparison": {  # across kinds, through the plans of the converters
        *("ckpttool.converting", "ckpttool.merging", "ckpttool.architectures", "ckpttool.inspection"),
        *("ckpttool.export", "ckpttool.naming", "ckpttool.gathering", "ckpttool.plan", "ckpttool.fusing"),
        *("ckpttool.lowrank", "ckpttool.reading", "ckpttool.elements", "ckpttool.layout", "ckpttool.source"),
        *("ckpttool.formats", "ckpttool.staging", "ckpttool.wholefile", "ckpttool.tensors", "ckpttool.errors"),
        "ckpttool.crew",
        "ckpttool.unpickle",  # to pause the collector
    },
    "ckpttool.verification": {
        *("ckpttool.comparison", "ckpttool.inspection", "ckpttool.staging", "ckpttool.reading", "ckpttool.elements"),
        *("ckpttool.crew", "ckpttool.wholefile"),
        *("ckpttool.layout", "ckpttool.source", "ckpttool.formats", "ckpttool.tensors", "ckpttool.errors"),
        *("ckpttool.unpickle", "ckpttool.records"),  # to pause the collector; to vet what torch is to read
    },
    "ckpttool.callbacks": {"ckpttool.errors"},
    "ckpttool.watching": {  # every command may be an action
        *("ckpttool.callbacks", "ckpttool.verification", "ckpttool.converting", "ckpttool.merging"),
        *("ckpttool.migration", "ckpttool.inspection", "ckpttool.export", "ckpttool.staging", "ckpttool.wholefile"),
        *("ckpttool.layout", "ckpttool.formats", "ckpttool.errors"),
        "ckpttool.environment",
    },
    "ckpttool.integrations": {"ckpttool.watching", "ckpttool.callbacks", "ckpttool.errors"},
    "ckpttool.demo": {"ckpttool.staging", "ckpttool.errors"},
    "ckpttool.render": {
        *("ckpttool.inspection", "ckpttool.migration", "ckpttool.merging", "ckpttool.converting", "ckpttool.demo"),
        *("ckpttool.architectures", "ckpttool.export", "ckpttool.errors", "ckpttool.telling"),
        *("ckpttool.comparison", "ckpttool.verification", "ckpttool.watching", "ckpttool.callbacks"),
        "ckpttool.formats",  # to fold names
    },
    "ckpttool.cli": {
        *("ckpttool.comparison", "ckpttool.verification", "ckpttool.watching", "ckpttool.callbacks"),
        *("ckpttool.render", "ckpttool.inspection", "ckpttool.migration", "ckpttool.merging", "ckpttool.demo"),
        *("ckpttool.converting", "ckpttool.architectures", "ckpttool.errors"),
        "ckpttool.layout",  # to complete the steps of a run, without the weight of an inspection
        "ckpttool.export",  # the words of --dtype
        "ckpttool.environment",
    },
    "ckpttool.__main__": {"ckpttool.cli"},
    "ckpttool": {"ckpttool.callbacks", "ckpttool.inspection", "ckpttool.source", "ckpttool.tensors", "ckpttool.errors"},
}

# Libraries that only some layers may import; all others come from the standard library or are free.
ONLY_IN = {"typer": {"ckpttool.cli"}, "click": set(), "rich": {"ckpttool.render"}}
OPERATIONS = (
    *("ckpttool.inspection", "ckpttool.migration", "ckpttool.merging", "ckpttool.converting", "ckpttool.watching"),
)
NEVER_AT_TOP = {"torch", "megatron", "transformers"}
NOT_TO_START = {
    "ckpttool": {"numpy", "rich", "typer", "ml_dtypes", "safetensors"},
    "ckpttool.source": {"numpy", "rich", "typer", "ml_dtypes", "safetensors"},
    "ckpttool.verification": {"numpy", "rich", "typer", "ml_dtypes", "safetensors"},
    "ckpttool.watching": {"numpy", "rich", "typer", "ml_dtypes", "safetensors"},
    "ckpttool.integrations": {"numpy", "rich", "typer", "ml_dtypes", "safetensors"},
    "ckpttool.cli": {"numpy", "rich", "ml_dtypes", "safetensors"},
}
"""What importing a module must not import with it."""

FORBIDDEN_CALLS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "marshal.loads", "shelve.open"),
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "print"),
}
FRAMEWORKS = "ckpttool.verification.frameworks"
"""The one module that may import torch (inside of functions) and load by it, with ``weights_only=True``."""


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str, *, top_level: bool = False) -> Iterator[str]:
    """Modules that this one imports, at run time, dotted. Those for annotations only do not count."""
    pending: list[ast.AST] = [tree(module)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole != "ckpttool.__version__":  # anyone may say it
                    yield whole if whole in MODULES else str(node.module)
        if not (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending += ast.iter_child_nodes(node)


def layer(module: str) -> str:
    """The layer that a module belongs to; none for a library."""
    return max((name for name in LAYERS if module == name or module.startswith(f"{name}.")), key=len, default="")


def calls(module: str) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(tree(module)) if isinstance(node, ast.Call))


@pytest.mark.parametrize("module", MODULES)
def test_arrows_go_down(module: str) -> None:
    mine = layer(module)
    others = {layer(name) for name in imports(module) if name.split(".")[0] == "ckpttool"} - {mine}
    assert others <= LAYERS[mine]


@pytest.mark.parametrize("module", MODULES)
def test_libraries_stay_where_they_belong(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(module)}
    assert {root for root in roots & ONLY_IN.keys() if layer(module) not in ONLY_IN[root]} == set()
    assert {name.split(".")[0] for name in imports(module, top_level=True)} & NEVER_AT_TOP == set()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_unpickled_run_or_printed(module: str) -> None:
    made = {ast.unparse(call.func) for call in calls(module)}
    assert made & FORBIDDEN_CALLS == ({"torch.load"} if module == FRAMEWORKS else set())


def test_torch_loads_weights_only() -> None:
    loads = [call for call in calls(FRAMEWORKS) if ast.unparse(call.func) == "torch.load"]
    said = [[ast.unparse(word.value) for word in call.keywords if word.arg == "weights_only"] for call in loads]
    assert said == [["True"]]


def test_one_module_imports_torch() -> None:
    roots = {module: {name.split(".")[0] for name in imports(module)} for module in MODULES}
    assert [module for module, found in roots.items() if found & NEVER_AT_TOP] == [FRAMEWORKS]


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("ckpttool.render")])
def test_renderers_see_results_only(module: str) -> None:
    operations = [name for name in imports(module) if layer(name) in OPERATIONS]
    assert [name for name in operations if not name.endswith(".result")] == []


def test_only_the_restricted_reader_knows_pickle() -> None:
    assert [module for module in MODULES if "pickle" in imports(module)] == ["ckpttool.unpickle"]


@pytest.mark.parametrize("module", MODULES)
def test_a_file_can_be_read_in_one_sitting(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(tree(module))


def test_there_are_layers_for_all_and_all_are_used() -> None:
    assert {layer(module) for module in MODULES} == set(LAYERS)


def test_layers_are_ordered() -> None:
    """Each layer imports only what stands above it in the table."""
    order = list(LAYERS)
    assert [(a, b) for a, below in LAYERS.items() for b in below if order.index(b) >= order.index(a)] == []


def reached(module: str) -> set[str]:
    """Everything that importing a module imports, at top level."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imports(name, top_level=True) if name in MODULES else ()
    return seen


@pytest.mark.parametrize("module", NOT_TO_START)
def test_importing_the_package_costs_nothing(module: str) -> None:
    assert {name.split(".")[0] for name in reached(module)} & NOT_TO_START[module] == set()


def test_the_walk_sees_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every kind, or the rules above hold for nothing."""
    path = tmp_path / "made.py"
    path.write_text("import a.b\nfrom c import d\nclass K:\n    import e\ndef f():\n    from ckpttool import errors\n")
    monkeypatch.setitem(MODULES, "made", path)
    assert set(imports("made")) == {"a.b", "c", "e", "ckpttool.errors"}
    assert set(imports("made", top_level=True)) == {"a.b", "c", "e"}
