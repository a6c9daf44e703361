"""A simulation of the engine's scheduling: no model, no torch, no tensors."""
