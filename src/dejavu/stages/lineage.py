"""`dejavu lineage run_dir=DIR`: from which bundle and cache a run, a bundle or a cache came."""

from dejavu.analysis.lineage import lineage
from dejavu.errors import ConfigError
from dejavu.schema import Config


def answer(config: Config) -> None:
    """Print a line for the folder and each of its ancestors. Raises ConfigError without `run_dir`."""
    if config.run_dir is None:
        raise ConfigError("name the folder of a run, bundle or cache: run_dir=DIR")
    print("\n".join(lineage(config.run_dir, config.runs).lines()))
