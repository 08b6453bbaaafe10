"""Which module may import which, and what no module may do, read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROOTS = {"sm70_convert": REPOSITORY / "convert", "sm70_kernels": REPOSITORY / "kernels"}
# What is pure or lies at the bottom, and all of sm70_convert that it may import. The package itself holds the version alone.
LOW = {
    "errors": set[str](),
    "names": set[str](),
    "layout": set[str](),
    "devices": set[str](),
    "tensor_parallel": {"layout"},
    "strict_json": {"errors"},
    "regular": {"errors"},
    "safetensors_header": {"errors", "strict_json"},
    "console": {"errors"},
}
# What describe.py uses of the console to format its rows; nothing of it prints there.
DESCRIBE_MAY_USE = {"Console", "human_bytes", "human_seconds"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.popen"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "subprocess"}


def module_of(path: Path) -> str:
    root = next(root for root in ROOTS.values() if root in path.parents)
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(p): ast.parse(p.read_text()) for root in ROOTS.values() for p in sorted(root.rglob("*.py"))}


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """Every node below `if TYPE_CHECKING:`."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {node for block in blocks for child in block.body for node in ast.walk(child)}


def imports(module: str, *, types: bool = True) -> Iterator[tuple[str, str, bool]]:
    """(module, name or "", whether the module's own import does it) of every import statement, also those in functions."""
    tree = MODULES[module]
    skipped = set() if types else for_types_only(tree)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    inside = {node for function in functions for node in ast.walk(function)} | for_types_only(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", node not in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                # `from package import module` is an import of the module.
                whole = f"{node.module}.{alias.name}"
                yield (
                    (whole, "", node not in inside)
                    if whole in MODULES
                    else (node.module or "", alias.name, node not in inside)
                )


def imported(module: str, *, types: bool = True) -> set[str]:
    return {name for name, _, _ in imports(module, types=types)}


def roots(module: str, *, at_import: bool = False) -> set[str]:
    """The top-level packages that a module imports; at_import: by its own import alone."""
    return {name.split(".")[0] for name, _, top in imports(module) if top or not at_import}


def calls(module: str) -> set[str]:
    """What a module calls, as it is written."""
    return {ast.unparse(n.func) for n in ast.walk(MODULES[module]) if isinstance(n, ast.Call)}


CONVERT = [m for m in MODULES if m.split(".")[0] == "sm70_convert"]
KERNELS = [m for m in MODULES if m.split(".")[0] == "sm70_kernels"]


def test_both_packages_were_found() -> None:
    assert {"sm70_convert", "sm70_convert.cli", "sm70_convert.formats.awq"} < set(CONVERT)
    assert {"sm70_kernels", "sm70_kernels.reference", "sm70_kernels.numpy_sm70"} < set(KERNELS)
    assert len(CONVERT) + len(KERNELS) == len(MODULES)


@pytest.mark.parametrize("root", ROOTS.values(), ids=lambda root: root.name)
def test_a_source_root_is_no_package(root: Path) -> None:
    # A top-level package `kernels` would shadow the one that transformers imports.
    assert [p.name for p in root.glob("*.py")] == []
    packages = [p.name for p in root.iterdir() if (p / "__init__.py").exists()]
    assert packages == [name for name, where in ROOTS.items() if where == root]


@pytest.mark.parametrize("module", KERNELS)
def test_kernels_import_nothing_of_the_tool(module: str) -> None:
    assert roots(module) <= {"sm70_kernels", "numpy", "torch", "triton", "__future__"} | sys.stdlib_module_names
    # Tensor to tensor: they read no files and no settings.
    assert "open" not in calls(module)
    assert not roots(module) & {"json", "safetensors", "huggingface_hub"}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"sm70_convert.__main__"}))
def test_nothing_imports_the_command_line(module: str) -> None:
    assert "sm70_convert.cli" not in imported(module)


@pytest.mark.parametrize(
    "module", sorted(set(MODULES) - {"sm70_convert.cli", "sm70_convert.console", "sm70_convert.ending"})
)
def test_only_the_command_line_imports_the_console(module: str) -> None:
    used = {name for where, name, _ in imports(module) if where == "sm70_convert.console"}
    assert used <= (DESCRIBE_MAY_USE if module == "sm70_convert.describe" else set())


def test_describing_formats_and_does_not_print() -> None:
    assert {call for call in calls("sm70_convert.describe") if call.startswith("console.")} == set()


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"sm70_convert.console"}))
def test_only_the_console_prints(module: str) -> None:
    assert not calls(module) & {"print", "click.echo", "click.secho", "pprint", "warnings.warn"}
    written = {
        c for c in calls(module) if c.startswith(("sys.stdout", "sys.stderr")) and c.endswith((".write", ".writelines"))
    }
    assert written == set()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_runs_code_from_a_file(module: str) -> None:
    assert not calls(module) & FORBIDDEN_CALLS
    assert not roots(module) & FORBIDDEN_MODULES
    names = {n.id for n in ast.walk(MODULES[module]) if isinstance(n, ast.Name)}
    attributes = {ast.unparse(n) for n in ast.walk(MODULES[module]) if isinstance(n, ast.Attribute)}
    assert not (names | attributes) & FORBIDDEN_CALLS  # nor under another name
    keywords = {
        k.arg: ast.unparse(k.value) for n in ast.walk(MODULES[module]) if isinstance(n, ast.Call) for k in n.keywords
    }
    assert keywords.get("trust_remote_code", "False") == "False"
    assert keywords.get("allow_pickle", "False") == "False"


@pytest.mark.parametrize("module", LOW)
def test_a_low_module_imports_only_what_lies_below_it(module: str) -> None:
    ours = {name for name in imported(f"sm70_convert.{module}", types=False) if name.startswith("sm70_")}
    assert ours <= {f"sm70_convert.{name}" for name in LOW[module]}
    third_party = roots(f"sm70_convert.{module}") - sys.stdlib_module_names - {"sm70_convert"}
    assert third_party <= ({"click", "tqdm"} if module == "console" else set())


@pytest.mark.parametrize("module", [m for m in CONVERT if "vllm_plugin" not in m])
def test_the_tool_needs_vllm_and_transformers_nowhere_and_torch_only_when_called(module: str) -> None:
    assert not roots(module) & {"vllm", "transformers"}
    assert not roots(module, at_import=True) & {"torch", "huggingface_hub"}


@pytest.mark.parametrize(
    "module", ["sm70_convert.cli", "sm70_convert.console", "sm70_convert.ending", "sm70_convert.errors"]
)
def test_help_needs_click_alone(module: str) -> None:
    assert roots(module, at_import=True) - sys.stdlib_module_names <= {"click", "sm70_convert"}


def test_modules_import_each_other_in_one_direction() -> None:
    """No cycle, whether or not an import stands in a function."""
    below = {m: {i for i in imported(m, types=False) if i in MODULES and i != m} for m in MODULES}
    # A package's parts import its shared types, and it finds its parts when it is called.
    below["sm70_convert.formats"] -= {m for m in MODULES if m.startswith("sm70_convert.formats.")}
    while lowest := {m for m, needs in below.items() if not needs & set(below)}:
        below = {m: needs for m, needs in below.items() if m not in lowest}
    assert sorted(below) == []


@pytest.mark.parametrize("package", ROOTS)
def test_a_package_alone_imports_nothing_heavy(package: str) -> None:
    script = f"import sys, {package}\nprint([m for m in ('torch', 'numpy', 'vllm', 'click') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
