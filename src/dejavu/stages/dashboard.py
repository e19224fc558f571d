"""`dejavu dashboard`: the W&B dashboard of a config's tasks, printed, or with an account saved in the project."""

import importlib.util
import json

from dejavu.errors import ConfigError
from dejavu.evaluation.metrics import metric_names
from dejavu.schema import Config, Task


def answer(config: Config) -> None:
    """Print the definition as JSON, or with `publish` save it and print its address.

    Raises ConfigError when wandb-workspaces is not installed or there is no key.
    """
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError('the dashboard needs wandb-workspaces: pip install -e ".[dashboards]"')
    from dejavu.tracking.dashboard import as_json, dashboard, publish

    made = dashboard(config.tracking, main_metrics(config.tasks.run))
    print(publish(made) if config.publish else json.dumps(as_json(made), indent=1))


def main_metrics(tasks: dict[str, Task]) -> dict[str, str]:
    """{task: the metric that its line in a sweep names first}."""
    return {name: metric_names(task.kind, task.metrics)[0] for name, task in tasks.items()}
