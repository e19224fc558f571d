"""`dejavu report`: a notebook over a folder of finished runs, as one HTML page that needs nothing but itself."""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dejavu.analysis.activity import read_activity
from dejavu.analysis.latency import speed_and_quality
from dejavu.analysis.predictor_figures import read_bundle
from dejavu.analysis.runs import load_runs
from dejavu.errors import ConfigError, DataError
from dejavu.schema import Config, Report
from dejavu.tracking.files import write_text

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
# What each reads first: it says what is wrong with a folder before a kernel starts.
READ: dict[str, Callable[[Path], object]] = {
    "sparsity_vs_accuracy": load_runs,
    "why_it_works": read_activity,
    "latency": speed_and_quality,
    "predictors": lambda folder: read_bundle(folder / "train"),
}
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
    """Write report.html (or NOTEBOOK.html) into the folder, its pictures as files below figures/; returns the path.

    Raises ConfigError without a folder, DataError when the folder lacks what the notebook reads, when the packages for
    notebooks are not installed and when a cell fails.
    """
    if config.run_dir is None:
        raise ConfigError("dejavu report needs the folder of a sweep or of other finished runs: add run_dir=DIR")
    folder, name = Path(config.run_dir).resolve(), config.report.notebook
    READ[name](folder)
    check_installed()
    page = folder / ("report.html" if name == Report().notebook else f"{name}.html")
    notebook = executed(NOTEBOOKS / f"{name}.ipynb", folder)
    write_text(page, html(notebook, f"{folder.name}: {name.replace('_', ' ')}"))
    print(page)
    return page


def check_installed() -> None:
    """Raise DataError when the packages that run notebooks are not there: only this stage needs them."""
    missing = [name for name in ("papermill", "nbconvert", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(f"dejavu report needs {', '.join(missing)}: run pip install 'dejavu[notebooks]'")


def executed(source: Path, folder: Path) -> Any:
    """The notebook with its outputs, over the folder. Raises DataError when a cell or the kernel fails."""
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    parameters = {"run_dir": str(folder), "figures_dir": str(folder / "figures")}
    notebook = parameterize_notebook(load_notebook_node(str(source)), parameters)
    with tempfile.TemporaryDirectory(prefix="dejavu-") as sockets:  # files of this user's instead of ports for everyone
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        place = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, km=kernel, resources=place, extra_arguments=["--log-level=CRITICAL"])
        try:
            return client.execute()
        except CellExecutionError as error:
            reason = f"{error.ename}: {error.evalue}"
            raise DataError(f"{source.name} stopped over {folder} ({reason}): open it with this run_dir") from error
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
