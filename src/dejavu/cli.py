"""The `dejavu` command: `dejavu STAGE [overrides]`, each stage a Hydra app.

Only Hydra and this project's light modules are imported here, so that --help, --cfg job, tab completion and every error
about config or missing data answer at once; a stage imports torch and the rest when it starts.
"""

import difflib
import importlib
import itertools
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dejavu.errors import ConfigError, DejavuError
from dejavu.jobs.plan import plan, settled
from dejavu.jobs.sweep import run_sweep
from dejavu.jobs.work import perform
from dejavu.schema import Config
from dejavu.stages.inputs import QUESTIONS, STAGES
from dejavu.tracking.identity import flattened, resolved
from dejavu.tracking.run import Interrupted, RunFailed, log_to_terminal

CONF = Path(__file__).resolve().parents[2] / "conf"
SWEEPS = CONF.parent / "sweeps"
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
        sys.argv[1:] = with_sweeps_folder(arguments[1:])
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


def with_sweeps_folder(arguments: list[str]) -> list[str]:
    """The arguments of `-cn NAME`, with the folder sweeps/ added where NAME is a file there and no folder is named."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = set(words) & {"-cd", "--config-dir"}
    names = [value for key, value in itertools.pairwise(words) if key in ("-cn", "--config-name")]
    in_sweeps = any((SWEEPS / f"{name}.yaml").exists() and not (CONF / f"{name}.yaml").exists() for name in names)
    return [*arguments, "-cd", str(SWEEPS)] if in_sweeps and not given else arguments


def run_app(stage: str) -> int:
    """Compose the stage's config with Hydra and run it; returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as exceptions and are told in one sentence
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress is shown by rich, on a terminal only
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    log_to_terminal()
    ConfigStore.instance().store(name="schema", node=Config)
    name = stage if (CONF / f"{stage}.yaml").exists() else "config"
    codes: list[int] = []

    def task(composed: DictConfig | list[Any]) -> None:  # a multirun's jobs come all at once (hydra_plugins)
        # Not raised into Hydra, which would add lines of its own.
        try:
            codes.append(sweep(stage, composed) if isinstance(composed, list) else single(stage, composed))
        except DejavuError as error:
            if not isinstance(error, RunFailed):  # a run that failed has said so
                log.error("dejavu %s: %s", stage, error)
            codes.append(130 if isinstance(error, Interrupted) else 1)

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task)()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        log.error("dejavu %s: %s", stage, error if isinstance(error, ConfigError) else explain(error))
        return 1
    except ValueError as error:
        if "item value in defaults : bool" not in str(error):
            raise
        log.error(
            'dejavu %s: a list of `defaults` says on or off, which YAML takes for true or false: write tracking: "off"',
            stage,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    return max(codes, default=0)


def single(stage: str, composed: DictConfig) -> int:
    """One run, unless it is done."""
    if stage in QUESTIONS:
        importlib.import_module(f"dejavu.stages.{stage}").answer(settled(composed))
        return 0
    job = plan(stage, composed)
    record, ran = perform(job)
    if stage == "generate" and not ran:  # what was said then is what was asked for
        print(job.config.generate.prompt + record["text"])
    return 0


def sweep(stage: str, composed: list[Any]) -> int:
    """The jobs of a multirun."""
    if stage in QUESTIONS:
        raise ConfigError(f"{stage} answers for one config: run it without -m")
    return run_sweep(
        stage,
        [
            (overrides, ConfigError(explain(config)) if isinstance(config, Exception) else config)
            for overrides, config in composed
        ],
    )


def explain(error: Exception) -> str:
    """One sentence for an error of Hydra's or OmegaConf's: the key, what is wrong and what would be right."""
    text = "\n".join(str(part) for part in (error, error.__cause__) if part is not None)
    unknown = re.search(r"Could not (?:override|append to config)[^']*'([^']+)'", text)
    if unknown and "Key '" in text:
        key = unknown[1].split("=")[0].lstrip("+~")
        defaults = resolved(Config())
        if OmegaConf.select(OmegaConf.create(defaults), key) == {}:
            return f"options of one's own are added to {key} with a plus: +{key}.NAME=VALUE"
        keys = [known for known, _ in flattened(defaults)]
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
