"""The `dejavu` command: `dejavu STAGE [overrides]`, each stage a Hydra app.

Only Hydra and this project's light modules are imported here, so that --help, --cfg job, tab completion and every error
about config or missing data answer at once; a stage imports torch and the rest when it starts.
"""

import difflib
import importlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dejavu.errors import ConfigError, DejavuError
from dejavu.schema import Config, from_config
from dejavu.stages.inputs import QUESTIONS, STAGES, check_data, resolve_inputs
from dejavu.tracking.identity import config_hash, flattened, resolved
from dejavu.tracking.run import Run, RunFailed, execute, log_to_terminal

CONF = Path(__file__).resolve().parents[2] / "conf"
log = logging.getLogger("dejavu")


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["-sc"]:
        stage = _stage_of_completion()
    elif arguments[:1] in ([], ["-h"], ["--help"]):
        print(overview())
        return
    elif arguments[0] not in STAGES:
        near = difflib.get_close_matches(arguments[0], STAGES, 1)
        hint = f"did you mean {near[0]}?" if near else f"stages are {', '.join(STAGES)}"
        print(f"dejavu: {arguments[0]!r} is not a stage: {hint}", file=sys.stderr)
        sys.exit(1)
    else:
        stage = arguments[0]
        del sys.argv[1]
        if (stage, *arguments[1:2]) == ("dashboard", "publish"):
            sys.argv[1] = "publish=true"
    sys.exit(run_app(stage))


def overview() -> str:
    """What `dejavu --help` prints."""
    width = max(map(len, STAGES))
    stages = "\n".join(f"  {name:{width}}  {what}" for name, (what, _) in STAGES.items())
    return (
        "dejavu STAGE [key=value ...]\n\n"
        f"{stages}\n\n"
        "dejavu STAGE --help lists the config groups, --cfg job prints the composed config, -m runs a sweep.\n"
        'eval "$(dejavu -sc install=bash)" turns on tab completion.'
    )


def run_app(stage: str) -> int:
    """Compose the stage's config with Hydra and run it; returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as exceptions and are told in one sentence
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress is shown by rich, on a terminal only
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    log_to_terminal()
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver(
        "dejavu_sweep_root", lambda run_dir, runs: run_dir or f"{runs}/sweep/{stage}", replace=True
    )
    name = stage if (CONF / f"{stage}.yaml").exists() else "config"
    failures: list[str] = []
    sweeps: set[str] = set()

    def task(composed: DictConfig) -> str | None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            sweeps.add(str(composed.run_dir or f"{composed.runs}/sweep/{stage}"))
            if composed.trainer.devices > 1:
                failures.append("several processes")
                log.error(
                    "dejavu %s: trainer.strategy=ddp_spawn starts processes of its own, which a multirun's jobs "
                    "cannot: run it without -m",
                    stage,
                )
                return None
        # Not raised into Hydra, which would add lines of its own and, in a sweep, report the first failure only.
        try:
            return job(stage, composed)
        except DejavuError as error:
            if not isinstance(error, RunFailed):  # a run that failed has said so
                log.error("dejavu %s: %s", stage, error)
            failures.append(str(error))
            return None

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        log.error("dejavu %s: %s", stage, explain(error))
        return 1
    except KeyboardInterrupt:
        return 130
    if stage == "evaluate":
        show_sweeps(sweeps, failed=bool(failures))
    return 1 if failures else 0


def show_sweeps(roots: set[str], failed: bool) -> None:
    """Table and pictures of the evaluations in each sweep's folder; one of which all jobs failed has said enough."""
    for root in sorted(roots):
        try:
            importlib.import_module("dejavu.analysis.leaderboard").leaderboard(root)
        except DejavuError as error:
            if not failed:
                log.error("dejavu evaluate: %s", error)


def job(stage: str, composed: DictConfig) -> str:
    """One job: check, find inputs and folder, then run the stage unless it is done. Returns the config hash."""
    config = from_config(composed)
    if config.model.random_init:
        config.model.name += "-random"
    if config.model.path is not None:
        config.model.name = Path(config.model.path).resolve().name
    if stage in QUESTIONS:
        importlib.import_module(f"dejavu.stages.{stage}").answer(config)
        return ""
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    overrides = list(HydraConfig.get().overrides.task) if multirun else []
    if multirun:
        _require_named_inputs(stage, config)
    check_data(stage, config)
    inputs = resolve_inputs(stage, config)
    folder = run_folder(stage, config, inputs, overrides, multirun)
    if multirun and config.tracking.group is None:
        config.tracking.group = folder.parent.name

    ran = False

    def body(run: Run) -> None:  # imported only if there is something to do
        nonlocal ran
        ran = True
        importlib.import_module(f"dejavu.stages.{stage}").run(run)

    record = execute(stage, body, config, folder, inputs, overrides)
    if stage == "generate" and not ran:  # what was said then is what was asked for
        print(config.generate.prompt + record["text"])
    return str(record["config_hash"])


def run_folder(stage: str, config: Config, inputs: dict[str, str | None], overrides: list[str], multirun: bool) -> Path:
    """`run_dir`, or a folder under `runs`; in a multirun the job's own folder below it, named from its values."""
    if multirun:
        root = Path(config.run_dir or f"{config.runs}/sweep/{stage}")
        return root / job_name(overrides)
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path(config.runs) / stage / f"{config.model.name}-{config_hash(resolved(config), inputs)}"


def job_name(overrides: list[str]) -> str:
    """A folder name from a job's overrides: short keys, no characters that shells or file systems mind."""
    ignored = ("run_dir", "runs", "force", "tracking", "cache", "predictors", "data_root", "hydra")
    kept = [item.lstrip("+~") for item in overrides if item.lstrip("+~").split("=")[0].split(".")[0] not in ignored]
    parts = [f"{key.split('.')[-1]}={value}" for key, _, value in (item.partition("=") for item in kept)]
    return re.sub(r"[^\w.=,+-]", "_", ",".join(parts))[:200] or "job"


def _require_named_inputs(stage: str, config: Config) -> None:
    """The newest bundle may change while a sweep runs, so a sweep says which one it means."""
    needed = STAGES[stage][1]
    if "cache" in needed and config.cache is None:
        raise ConfigError("a multirun must name its cache: add cache=DIR")
    if "bundle" in needed and config.predictors is None and config.sparsity.selector in ("predictor", "static"):
        raise ConfigError("a multirun must name its predictors: add predictors=DIR")


def explain(error: Exception) -> str:
    """One sentence for an error of Hydra's or OmegaConf's: the key, what is wrong and what would be right."""
    text = "\n".join(str(part) for part in (error, error.__cause__) if part is not None)
    unknown = re.search(r"Could not (?:override|append to config)[^']*'([^']+)'", text)
    if unknown and "Key '" in text:
        key = unknown[1].split("=")[0].lstrip("+~")
        keys = [known for known, _ in flattened(resolved(Config()))]
        near = difflib.get_close_matches(key, keys, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "`--cfg job` prints all keys"
        return f"the key {key} does not exist: {hint}"
    missing = re.search(r"Could not (?:find|load) '(\w+)/([^']+)'", text)
    if missing and (CONF / missing[1]).is_dir():
        known = ", ".join(sorted((path.stem for path in (CONF / missing[1]).glob("*.yaml")), key=_natural))
        return f"{missing[1]}={missing[2]} is not known: choose one of {known}"
    value = re.search(r"(Value .*?)\n\s*full_key: (\S+)", text, re.DOTALL)
    if value:
        return f"{value[2]}: {value[1]}"
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _natural(text: str) -> list[Any]:
    """Sort key by which opt-2.7b comes before opt-13b."""
    return [float(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", text))]


def _stage_of_completion() -> str:
    """The stage in the line being completed, which is then hidden from Hydra; a stage half typed is completed here."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if sys.argv[2:3] and not sys.argv[2].startswith("query="):
        return "evaluate"
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        print("\n".join(stage for stage in STAGES if stage.startswith(words[1] if len(words) == 2 else "")))
        sys.exit(0)
    stage = words[1] if words[1] in STAGES else "evaluate"
    shorter = line.replace(f" {words[1]}", "", 1)
    point = int(os.environ.get("COMP_POINT", len(line))) - (len(line) - len(shorter))
    os.environ["COMP_LINE"], os.environ["COMP_POINT"] = shorter, str(max(point, 0))
    return stage
