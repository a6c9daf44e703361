"""Performance: what a model costs, predicted, measured, solved for and simulated."""
