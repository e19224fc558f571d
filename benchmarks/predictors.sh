#!/usr/bin/env bash
# The tables of docs/predictors.md, by `make predictors`; wants runs/readme of `make tables`. What is complete is skipped.
set -euo pipefail
dejavu=.venv/bin/dejavu python=.venv/bin/python to=runs/predictors

# Forms, ranks and taps share one cache; then how much text, and two rounds of on-policy recording.
$dejavu collect corpus.tokens=50000 run_dir=$to/collect
$dejavu train -cn predictor_forms cache=$to/collect run_dir=$to/forms
$dejavu train -cn predictor_rank predictor.rank=8,16,64,128 cache=$to/collect run_dir=$to/ranks
$dejavu train -cn lookahead predictor.tap=direct,previous,mixed cache=$to/collect run_dir=$to/lookahead
for tokens in 12500 25000 100000 200000; do
  $dejavu collect corpus.tokens=$tokens run_dir=$to/tokens/collect-$tokens
  $dejavu train cache=$to/tokens/collect-$tokens run_dir=$to/tokens/tokens-$tokens
done
before="$to/forms/predictor=default"
for round in 1 2; do
  $dejavu collect collect.on_policy=true "predictors='$before'" sparsity.ratio=0.75 corpus.tokens=50000 \
    run_dir=$to/on_policy/collect-$round
  $dejavu train cache=$to/on_policy/collect-$round run_dir=$to/on_policy/round-$round
  before=$to/on_policy/round-$round
done

# Forms by part, the others with both parts skipped.
named() { printf "'%s'," "$@" | sed 's/,$//'; }
$dejavu evaluate -cn predictor_quality "predictors=$(named $to/forms/predictor=*)" run_dir=$to/quality
$dejavu evaluate -cn predictor_quality sparsity.part=both run_dir=$to/quality \
  "predictors=$(named $to/ranks/rank=* $to/lookahead/tap=* $to/tokens/tokens-* $to/on_policy/round-*)"
$dejavu evaluate -cn predictor_quality sparsity.selector=oracle run_dir=$to/quality
$python -m dejavu.analysis.bundles $to/quality
cp $to/quality/bundles.png docs/images/
for name in forms ranks tokens lookahead on_policy; do
  $python -m dejavu.analysis.readme $to/quality docs/predictors.md $name
done

# Budgets, found on text of the train split with predictors and with the oracle, then measured once on held-out text.
calibrated() { # name, bundle, selector
  $dejavu calibrate "predictors=$2" sparsity.selector=$3 calibrate.max_perplexity_increase=0.01 run_dir=$to/calibrate/$1
  share=$(sed -n 's/.*perplexity.*sparsity.ratio=//p' $to/calibrate/$1/log.txt | tail -n 1)
  evaluate="$dejavu evaluate -cn calibrated predictors=$to/calibrate/$1 sparsity.selector=$3 run_dir=$to/calibrated/$1"
  $evaluate
  $evaluate sparsity.budget=calibrated sparsity.ratio="$share"
}
$dejavu train predictor.tap=mixed predictor.rank=64 cache=runs/readme/collect run_dir=$to/rank_64
calibrated predictor runs/readme/train predictor
calibrated rank_64 $to/rank_64 predictor
calibrated oracle runs/readme/train oracle
$python -m dejavu.analysis.readme $to/calibrated docs/predictors.md calibrated
