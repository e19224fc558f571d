"""Predictors of the heads and neurons that matter: network, labels, training, and the bundle that is shared."""
