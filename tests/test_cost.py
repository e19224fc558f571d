"""What predictors cost against what they save."""

import pytest
from bundles import untrained_bundle
from tiny import tiny_opt

from dejavu.models.families import anatomy
from dejavu.sparsity.accounting import cost_account
from dejavu.stages.evaluate import warn_of_cost

BODY = 2 * (4 * 32 * 32 + 2 * 32 * 64)  # two layers of width 32 with 64 neurons


def measured(mlp: float, heads: float) -> dict:
    body = (mlp * 2 * 32 * 64 + heads * 4 * 32 * 32) / (BODY / 2)
    return {"mlp_density_per_layer": [mlp] * 2, "head_density_per_layer": [heads] * 2, "body_density": body}


def test_only_predictors_that_were_asked_count(tmp_path):
    model = tiny_opt()
    bundle = untrained_bundle(model, tmp_path / "bundle", rank=4)
    neurons = 2 * (2 * 32 + 4 * 32 + 4 + 64 * 4 + 64)  # norm, first half, second half, in both layers
    found = cost_account(measured(0.25, 1.0), bundle, anatomy(model))
    assert found["predictors"] == pytest.approx(neurons / BODY)
    assert found["gross_skipped"] == pytest.approx(0.75 * 2 * 2 * 32 * 64 / BODY)
    assert found["net_skipped"] == pytest.approx(found["gross_skipped"] - found["predictors"])
    both = cost_account(measured(0.25, 0.25), bundle, anatomy(model))
    assert both["predictors"] > found["predictors"] and both["gross_skipped"] == pytest.approx(0.75)


def test_a_predictor_that_costs_more_than_it_saves_is_told(tmp_path):
    model, said = tiny_opt(), []
    bundle = untrained_bundle(model, tmp_path / "bundle", rank=32)

    class Run:
        say = said.append

    warn_of_cost(cost_account(measured(0.25, 0.25), bundle, anatomy(model)), Run())
    assert said == []
    warn_of_cost(cost_account(measured(0.5, 0.5), bundle, anatomy(model)), Run())
    assert said == [
        "warning: these predictors read 54.7% of the body's weights to leave out 50.0%: lower predictor.rank, or "
        "leave more out"
    ]
