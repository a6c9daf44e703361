"""How a schedule sits in a transformers model: families, gates, cache, attach."""
