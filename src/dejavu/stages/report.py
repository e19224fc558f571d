"""`dejavu report`: the first notebook over a folder of evaluations, as one HTML page that needs nothing but itself."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from dejavu.analysis.runs import load_runs
from dejavu.errors import ConfigError, DataError
from dejavu.schema import Config
from dejavu.tracking.files import write_text

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "sparsity_vs_accuracy.ipynb"
# Lab's page without its scripts, which come from other hosts: there is no mathematics, diagram or widget to draw.
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_css %}<style>
main { max-width: 1100px; margin: auto; }
.jp-InputPrompt, .jp-OutputPrompt, .jp-OutputArea-prompt { display: none; }
</style>{% endblock %}"""


def answer(config: Config) -> Path:
    """Write report.html into the folder, its pictures as files below figures/; returns the page's path.

    Raises ConfigError without a folder, DataError when it holds no finished evaluation or a damaged one, when the
    packages for notebooks are not installed and when a cell of the notebook fails.
    """
    if config.run_dir is None:
        raise ConfigError("dejavu report needs the folder of a sweep or of evaluations: add run_dir=DIR")
    folder = Path(config.run_dir).resolve()
    load_runs(folder)  # says what is wrong with the folder, before a kernel starts
    check_installed()
    page = folder / "report.html"
    write_text(page, html(executed(folder), f"{folder.name}: sparsity against accuracy"))
    print(page)
    return page


def check_installed() -> None:
    """Raise DataError when the packages that run notebooks are not there: only this stage needs them."""
    missing = [name for name in ("papermill", "nbconvert", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(f"dejavu report needs {', '.join(missing)}: run pip install 'dejavu[notebooks]'")


def executed(folder: Path) -> Any:
    """The notebook with its outputs, over the folder. Raises DataError when a cell or the kernel fails."""
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    parameters = {"run_dir": str(folder), "figures_dir": str(folder / "figures")}
    notebook = parameterize_notebook(load_notebook_node(str(NOTEBOOK)), parameters)
    with tempfile.TemporaryDirectory(prefix="dejavu-") as sockets:  # files of this user's instead of ports for everyone
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        place = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, km=kernel, resources=place, extra_arguments=["--log-level=CRITICAL"])
        try:
            return client.execute()
        except CellExecutionError as error:
            reason = f"{error.ename}: {error.evalue}"
            raise DataError(f"{NOTEBOOK.name} stopped over {folder} ({reason}): open it with this run_dir") from error
        except RuntimeError as error:  # nbclient's for a kernel that died or never answered
            raise DataError(f"the kernel that reads {folder} did not work ({error}): try again") from error


def html(notebook: Any, title: str) -> str:
    """One page without code cells, its images inside."""
    from nbconvert import HTMLExporter

    notebook.metadata["title"] = title
    exporter = HTMLExporter(
        raw_template=TEMPLATE, exclude_input=True, exclude_output_prompt=True, embed_images=True,
        exclude_anchor_links=True,
    )  # fmt: skip
    text, _ = exporter.from_notebook_node(notebook)
    return str(text)
