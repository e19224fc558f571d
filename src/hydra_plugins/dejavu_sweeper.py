"""Hydra's basic sweeper, but it only composes the jobs and hands them all to the task at once (dejavu/jobs/sweep.py).

So a job whose config does not compose is one failed job, and how jobs are run does not hang on what Hydra can pickle.
Hydra accepts sweepers from the package `hydra_plugins` only.
"""

from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, flag_override
from omegaconf.errors import OmegaConfBaseException

from dejavu.errors import ConfigError

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


@dataclass
class ComposingSweeperConf:
    """`params`: swept keys, as in Hydra's basic sweeper."""

    _target_: str = "hydra_plugins.dejavu_sweeper.ComposingSweeper"
    params: dict[str, str] | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="dejavu", node=ComposingSweeperConf, provider="dejavu")


class ComposingSweeper(BasicSweeper):
    """The task is called once, with (overrides, composed config or the error that composing gave) of each job."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size=None, params=params)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Without a launcher of Hydra's. Raises ConfigError when one was asked for."""
        if config.hydra.launcher._target_ != BASIC_LAUNCHER:
            raise ConfigError("hydra/launcher is not used here: choose launcher=joblib or another of conf/launcher")
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        """Compose every job."""
        loader = self.hydra_context.config_loader
        parser = OverridesParser.create(config_loader=loader)
        (jobs,) = self.split_arguments(parser.parse_overrides([*self._parse_config(), *arguments]), None)
        return self.task_function([(overrides, self.composed(list(overrides))) for overrides in jobs])

    def composed(self, overrides: list[str]) -> DictConfig | Exception:
        """One job's config without Hydra's own part, or why there is none."""
        try:
            config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            return error
        with flag_override(config, ["readonly", "struct"], False):
            del config["hydra"]
        return config
