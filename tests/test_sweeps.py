"""Every file in sweeps/ composes, runs and says what it is for; a user's own file does as well."""

import re
from collections import Counter
from pathlib import Path

import pytest
from bundles import untrained_bundle
from omegaconf import OmegaConf
from rows import data_folder
from tiny import tiny_opt

from dejavu import cli
from dejavu.checks import check
from dejavu.config import resolve_point
from dejavu.jobs.plan import varying_keys
from dejavu.jobs.sweep import plans, run_sweep
from dejavu.models import EMBEDDED
from dejavu.models.anatomy import Anatomy
from dejavu.schema import Config, Sparsity
from dejavu.sparsity.budget import make_budget, scheduled

ROOT = Path(__file__).resolve().parents[1]
# name -> (stage, what makes it small, jobs it then has, of which are dense)
SWEEPS = {
    "sparsity_grid": ("evaluate", ["sparsity.ratio=0.5,0.75"], 9, 1),
    "per_part": ("evaluate", ["sparsity.ratio=0.5"], 7, 1),
    "model_sizes": ("evaluate", ["model=opt-125m,opt-6.7b", "sparsity.selector=dense,predictor"], 6, 2),
    "paper_175b": ("evaluate", ["sparsity.selector=dense,predictor"], 2, 1),
    "real_tasks": ("evaluate", ["sparsity.point=dense@0,svd@0.5"], 2, 1),
    "smollm2": ("evaluate", ["sparsity.point=dense@0,random@0.5@mlp", "model.separator=null"], 2, 1),
    "smollm2_engine": ("evaluate", ["sparsity.point=dense@0,predictor@0.5", "model.separator=null"], 2, 1),
    "engine": ("evaluate", ["decode.storage=float32", "sparsity.point=dense@0,predictor@0.75"], 2, 1),
    "predictor_quality": ("evaluate", ["sparsity.part=both,mlp"], 2, 0),
    "calibrated": ("evaluate", ["sparsity.budget=uniform", "sparsity.ratio=0.5,0.75"], 2, 0),
    "predictor_rank": ("train", ["predictor.rank=8,64"], 2, 0),
    "lookahead": ("train", ["predictor.tap=direct,previous"], 2, 0),
    "predictor_forms": ("train", ["predictor=default,reference"], 2, 0),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, str]:
    """What a sweep reads, in small: a random model of two layers, its bundle and cache, generated rows of every set."""
    from transformers import AutoTokenizer

    from dejavu.schema import Collect, Corpus, Model, Tracking
    from dejavu.stages import collect
    from dejavu.tracking.run import execute

    root = tmp_path_factory.mktemp("tiny")
    model = tiny_opt(vocab_size=4096)
    model.save_pretrained(root / "model")
    AutoTokenizer.from_pretrained(EMBEDDED / "opt-tiny").save_pretrained(root / "model")
    untrained_bundle(model, root / "bundle")
    config = Config(
        model=Model(name="model", path=str(root / "model")), corpus=Corpus(name="mixture", tokens=512, block=64),
        collect=Collect(), tracking=Tracking(mode="off"), data_root=str(data_folder(root / "data", rows=24)),
    )  # fmt: skip
    execute("collect", collect.run, config, root / "cache", {"cache": None, "bundle": None})
    return {"model.path": str(root / "model"), "predictors": str(root / "bundle"), "cache": str(root / "cache"),
            "data_root": str(root / "data")}  # fmt: skip


def test_the_list_is_complete():
    assert {path.stem for path in (ROOT / "sweeps").glob("*.yaml")} == set(SWEEPS)


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_runs_its_first_and_last_job_on_a_tiny_model(name, dejavu, tiny, monkeypatch, tmp_path):
    stage, smaller, total, dense = SWEEPS[name]

    def ends_only(stage, composed):
        jobs, refused = plans(stage, composed, varying_keys([overrides for overrides, _ in composed]))
        selectors = Counter(job.config.sparsity.selector for job in jobs if stage == "evaluate")
        assert (len(jobs), selectors["dense"]) == (total, dense) and refused == []
        return run_sweep(stage, [composed[0], composed[-1]])

    monkeypatch.setattr(cli, "run_sweep", ends_only)
    if name != "sparsity_grid":  # seconds of drawing
        monkeypatch.setattr("dejavu.jobs.sweep.show", lambda roots, complete: None)
    small = [*smaller, *(f"{key}={value}" for key, value in tiny.items()), "tasks.limit=2", "dtype=float32"]
    assert dejavu(stage, "-cn", name, *small, "trainer.epochs=1", "tracking=off", f"run_dir={tmp_path / 'sweep'}") == 0
    assert len(list((tmp_path / "sweep").glob("*/result.json"))) == 2
    assert (tmp_path / "sweep" / "table.csv").exists() == (name == "sparsity_grid")


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_of_a_sweep_is_one(name):
    params = OmegaConf.load(ROOT / "sweeps" / f"{name}.yaml").hydra.sweeper.params
    points = [word.strip() for word in params.get("sparsity.point", "").split(",") if word.strip()]
    known = [Sparsity(point=point) for point in points]
    for sparsity in known:
        resolve_point(sparsity)
        check(Config(sparsity=sparsity))
    assert len(set(points)) == len(points)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_says_in_its_first_comment_what_it_answers_and_how_it_is_run(name):
    head = (ROOT / "sweeps" / f"{name}.yaml").read_text().split("defaults:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"dejavu {SWEEPS[name][0]} -cn {name} " in head
    assert "?" in head or name == "smollm2"


def test_on_and_off_are_in_quotes_in_every_yaml_file():
    """YAML takes them for booleans, and `tracking: off` then names no mode."""
    for folder in ("conf", "sweeps"):
        for path in sorted((ROOT / folder).rglob("*.yaml")):
            words = re.findall(
                r"^[^#\n]*?[:\-,\[]\s*(on|off|yes|no)\s*(?:[,\]#]|$)", path.read_text(), re.MULTILINE | re.I
            )
            assert words == [], f"{path}: {words}"


def own_sweep(folder: Path, off: str) -> None:
    """A user's sweep file."""
    (folder / "mine.yaml").write_text(
        f"defaults:\n  - config\n  - override tracking: {off}\n  - _self_\n"
        "sparsity: {selector: dense}\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {seed: '0,1'}\n"
    )


def test_a_users_own_sweep_file_may_turn_tracking_off(dejavu, tmp_path, monkeypatch, capsys):
    modes = []
    monkeypatch.setattr(cli, "run_sweep", lambda stage, jobs: modes.extend(c.tracking.mode for _, c in jobs) or 0)
    own_sweep(tmp_path, '"off"')
    assert dejavu("evaluate", "-cd", str(tmp_path), "-cn", "mine") == 0 and modes == ["off", "off"]
    own_sweep(tmp_path, "off")
    assert dejavu("evaluate", "-cd", str(tmp_path), "-cn", "mine") == 1
    assert 'write tracking: "off"' in capsys.readouterr().err


def test_the_papers_schedule_is_the_papers_on_its_model():
    paper = OmegaConf.load(ROOT / "sweeps" / "paper_175b.yaml").sparsity
    sparsity = Sparsity(selector="oracle", **OmegaConf.to_container(paper))  # type: ignore[arg-type]
    model = Anatomy("opt", (None,) * 96, 12288, 96, 96, 128, 49152, False, True, False, 2048, 2)  # type: ignore[arg-type]
    budget = make_budget(sparsity, model)
    assert budget.mlp == (5000,) * 86 + (49152,) * 10
    assert budget.heads == (96,) * 5 + (24,) * 29 + (48,) * 29 + (24,) * 32 + (96,)
    asked = (1 - sum(budget.mlp) / 96 / 49152, 1 - sum(budget.heads) / 96 / 96)
    assert asked == pytest.approx((sparsity.mlp, sparsity.heads), abs=1e-3)
    assert scheduled([[0, 0.5], [0.5, 0.25], [0.6, 0]], 2) == [0.5, 0], "steps within one layer: the last counts"
