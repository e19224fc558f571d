"""Imports go one way: a module imports only from those before it in the list of docs/architecture.md."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "dejavu"
ORDER = [
    "errors", "schema", "checks", "config", "models", "corpora", "tracking", "activations", "predictors", "sparsity",
    "decode", "evaluation", "analysis", "benchmark", "pretraining", "stages", "jobs", "cli",
]  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def module_of(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package"
            names = [node.module or ""]
        for name in names:
            if name.startswith("dejavu."):
                assert ORDER.index(module_of(name)) <= ORDER.index(own), f"{own} imports {name}"


def test_every_module_is_in_the_list():
    found = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert found == set(ORDER)


def test_nothing_of_ours_unpickles():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                call = ast.unparse(node.func)
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if call == "torch.load":
                    assert keywords.get("weights_only") == "True", f"{path}: torch.load without weights_only"
                assert not call.startswith("pickle."), f"{path}: {call}"
                assert keywords.get("allow_pickle") != "True" and keywords.get("trust_remote_code") != "True", path


# The word by itself or in a class's name; names of models (opt-tiny, smollm2-135m) are data.
FAMILY = re.compile(r"(?i:(?<![\w-])(?:llama|opt|smollm2)(?![\w-]))|\b(?:OPT|Llama)[A-Z][a-z]")
NAMED_IN = {
    *(f"pretraining/{name}.py" for name in ("card", "fit", "module", "muon", "tokenizer")),  # they make one
    "stages/doctor.py",  # a published figure of one, and the make target that brings another
}  # fmt: skip


def test_no_family_is_named_outside_models():
    found = {
        str(path.relative_to(SOURCE)): FAMILY.findall(path.read_text())
        for path in FILES
        if path.relative_to(SOURCE).parts[0] != "models"
    }
    assert {path for path, names in found.items() if names} == NAMED_IN
    assert FAMILY.findall("OPT's, LlamaConfig, llama") and not FAMILY.findall(
        "opt-tiny, opt-1.3b, option, smollm2-135m"
    )
