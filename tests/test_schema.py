"""What the schema resolves and refuses beyond single values (those: test_cli)."""

import pytest

from dejavu.errors import ConfigError
from dejavu.schema import Sparsity, resolve_point
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
