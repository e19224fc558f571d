"""The W&B dashboard as code: what a project of sweeps is looked at with, made of keys that the runs log.

Needs wandb-workspaces (the extra `dashboards`). Nothing here asks a server but `publish`.
"""

from collections.abc import Mapping
from typing import Any

import wandb
import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as ws

from dejavu.errors import ConfigError, DataError
from dejavu.schema import Tracking
from dejavu.tracking.wandb_run import LAYER

NAME = "Sparsity against quality"
SELECTOR = "sparsity.selector"
LEGEND = f"${{config:{SELECTOR}}} ${{summary:requested/mlp}} ${{run:displayName}}"
SHARES = {  # summary key -> what it is called
    "requested/mlp": "fraction of neurons skipped, as asked",
    "requested/heads": "fraction of heads skipped, as asked",
    "sparsity/mlp_density": "share of neurons computed",
    "sparsity/head_density": "share of heads computed",
    "sparsity/body_density": "share of the body's weights computed",
}
LAYERS = {
    "layer/mlp_recall_of_mass": "recall of mass, neurons",
    "layer/head_recall_of_mass": "recall of mass, heads",
    "layer/mlp_density": "density, neurons",
    "layer/head_density": "density, heads",
}
LATENCY = "timing/ms_per_token"  # logged by backend=kernel
PICTURE = "layers"  # the heat map that evaluate logs


class Dashboard(ws.Workspace):
    """A workspace whose table is grouped by sweep while its panels show every run."""

    def _to_model(self) -> Any:
        view = super()._to_model()
        section = view.spec.section
        for settings in (section.settings, *(each.local_panel_settings for each in section.panel_bank_config.sections)):
            settings.use_runs_table_grouping_in_panels = False
        return view


def dashboard(tracking: Tracking, mains: Mapping[str, str]) -> Dashboard:
    """The definition; `mains` names the metric that counts of every task, {task: metric}."""
    values = [f"{task}/{metric}" for task, metric in mains.items()]
    perplexities = [value for value in values if value.endswith("perplexity")]
    sections = [section("Quality against sparsity", quality(values), columns=2)]
    if perplexities:
        sections.append(section("Latency against perplexity", latency(perplexities), columns=2))
    sections.append(section("Layers", layers(), columns=2))
    sections.append(section("Sweep", [sweep(values)], columns=1))
    return Dashboard(
        entity=tracking.entity or "",
        project=tracking.project,
        name=NAME,
        sections=sections,
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Metric("JobType") == "evaluate"),
            groupby=[ws.Metric("Group")],
            order=[ws.Ordering(ws.Summary("sparsity/body_density"), ascending=False)],
            pinned_columns=[column(SELECTOR), *(f"summary:{key}" for key in (*SHARES, *values)), "run:state"],
        ),
    )


def section(name: str, contents: list[Any], columns: int) -> ws.Section:
    """An open section, all of whose panels are visible without turning a page."""
    rows = -(-len(contents) // columns)
    layout = ws.SectionLayoutSettings(columns=columns, rows=rows)
    return ws.Section(name=name, panels=contents, is_open=True, layout_settings=layout)


def quality(values: list[str]) -> list[Any]:
    """Each metric by what was asked to be skipped, and beside it by the weights that were computed."""
    return [
        scatter(f"{value} by {SHARES[share]}", share, value)
        for value in values
        for share in ("requested/mlp", "sparsity/body_density")
    ]


def latency(values: list[str]) -> list[Any]:
    """The Pareto front, a line along the lowest perplexity so far from the fastest on. Runs of backend=kernel only."""
    return [scatter(f"{value} by milliseconds a token", LATENCY, value, running_ymin=True) for value in values]


def scatter(title: str, x: str, y: str, **how: Any) -> Any:
    """A point a run, labelled with its selector and ratio."""
    horizontal, vertical = panels.SummaryMetric(x), panels.SummaryMetric(y)
    return panels.ScatterPlot(title=title, x=horizontal, y=vertical, legend_template=LEGEND, **how)


def layers() -> list[Any]:
    """A line a run over the layers for each measure, and the heat maps of the runs chosen in the table."""
    lines = [
        panels.LinePlot(title=title, x=LAYER, y=[key], title_x="layer", legend_template=LEGEND, max_runs_to_show=100)
        for key, title in LAYERS.items()
    ]
    return [*lines, panels.MediaBrowser(title="layers", media_keys=[PICTURE], num_columns=2)]


def sweep(values: list[str]) -> Any:
    """A line a run through what was chosen and what came of it."""
    keys = [panels.Config(SELECTOR), *(panels.SummaryMetric(key) for key in (*SHARES, *values))]
    columns = [panels.ParallelCoordinatesPlotColumn(metric=key) for key in keys]
    return panels.ParallelCoordinatesPlot(title="selectors, shares and metrics", columns=columns)


def column(key: str) -> str:
    """A config key as the run table names it: W&B keeps a nested config below the first name's `value`."""
    first, *rest = key.split(".")
    return ".".join([f"config:{first}", "value", *rest])


def as_json(workspace: Dashboard) -> dict[str, Any]:
    """What would be sent, without the ids that are drawn anew each time."""
    model: dict[str, Any] = workspace._to_model().model_dump(by_alias=True, mode="json", exclude_none=True)
    return without_ids(model)


def without_ids(value: Any) -> Any:
    """A copy of nested JSON without its `__id__`s."""
    if isinstance(value, dict):
        return {key: without_ids(entry) for key, entry in value.items() if key != "__id__"}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


def publish(workspace: Dashboard) -> str:
    """Save it as a new view of the project and return its address.

    Raises ConfigError without a key and DataError when the server refuses or cannot be reached.
    """
    try:
        api = wandb.Api()
    except wandb.errors.UsageError as error:
        raise ConfigError(
            "publishing needs a W&B account: run `wandb login` or set WANDB_API_KEY; without one `dejavu dashboard` "
            "prints the definition and `wandb leet` shows the runs"
        ) from error
    except wandb.errors.Error as error:
        raise refused(error) from error
    try:
        workspace.entity = workspace.entity or api.default_entity or ""
        return str(workspace.save().url)
    except Exception as error:  # whatever the client's transport raises
        raise refused(error) from error


def refused(error: Exception) -> DataError:
    return DataError(
        f"W&B did not take the dashboard ({type(error).__name__}: {error}): check tracking.entity and project"
    )
