"""Performance: what a model costs, predicted, measured and solved for."""
