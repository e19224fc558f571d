"""What the schema resolves and refuses beyond single values (those: test_cli)."""

import pytest

from dejavu.config import resolve_point
from dejavu.errors import ConfigError
from dejavu.schema import Sparsity
from dejavu.tracking.identity import config_hash, resolved


@pytest.mark.parametrize(
    ("point", "selector", "ratio", "rule", "part"),
    [
        ("oracle@0.5", "oracle", 0.5, "topk", "both"),
        ("gate@0.25@threshold", "gate", 0.25, "threshold", "both"),
        ("static@0.9@mlp", "static", 0.9, "topk", "mlp"),
        ("predictor@0.5@threshold@heads", "predictor", 0.5, "threshold", "heads"),
    ],
)
def test_a_point_says_selector_ratio_rule_and_part(point, selector, ratio, rule, part):
    sparsity = Sparsity(point=point)
    resolve_point(sparsity)
    assert sparsity == Sparsity(selector=selector, ratio=ratio, rule=rule, part=part), "as if they had been given"


@pytest.mark.parametrize("point", ["oracle", "oracle@", "oracle@many", "@"])
def test_a_point_of_another_form_is_refused(point):
    with pytest.raises(ConfigError, match="SELECTOR@RATIO"):
        resolve_point(Sparsity(point=point))
    with pytest.raises(ConfigError, match="choose one of topk"):
        resolve_point(Sparsity(point="oracle@0.5@best"))


def test_a_point_is_the_same_run_as_its_parts():
    from dejavu.schema import Config

    pointed, plain = Config(), Config()
    pointed.sparsity.point = "oracle@0.5"
    resolve_point(pointed.sparsity)
    plain.sparsity.selector, plain.sparsity.ratio = "oracle", 0.5
    assert config_hash(resolved(pointed), {}) == config_hash(resolved(plain), {})


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([[0.5, 0.9]], "is not of the form"), ([], "is not of the form"), ([[0]], "is not of the form"),
        ([[0, "much"]], "is not of the form"), ([[0, 0.5], [0.2, 1], [0.1, 0]], "do not rise"),
        ([[0, 0.5], [1, 0]], "do not rise from 0 to below 1"), ([[0, 1.5]], "out of range"),
    ],
)  # fmt: skip
def test_a_schedule_of_another_form_is_refused(steps, says):
    from dejavu.checks import check
    from dejavu.schema import Config

    check(Config(sparsity=Sparsity(mlp_schedule=[[0, 0.5], [0.9, 0]])))
    with pytest.raises(ConfigError, match=says):
        check(Config(sparsity=Sparsity(heads_schedule=steps)))


def test_dense_is_one_config_whatever_ratios_are_said_beside_it():
    from omegaconf import OmegaConf

    from dejavu.config import from_config
    from dejavu.schema import Config

    said = [{}, {"ratio": 0.5, "part": "mlp"}, {"mlp": 0.9, "heads_layers": [0.5]}, {"mlp_schedule": [[0, 0.5]]}]
    said = [{"sparsity": {"selector": "dense", **each}} for each in said] + [{"sparsity": {"point": "dense@0"}}]
    hashes = {config_hash(resolved(from_config(OmegaConf.merge(OmegaConf.structured(Config), s))), {}) for s in said}
    assert len(hashes) == 1
