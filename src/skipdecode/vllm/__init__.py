"""SkipDecode inside vLLM, as a plugin: nothing of vLLM is forked, and without a schedule it stays as it is.

vLLM calls `register` (plugin.py) in each of its processes. When a model's config carries a schedule, the plugin refuses
what cannot be right and names our worker and scheduler; `PluginSettings` (settings.py) travel in vLLM's own
`additional_config`. In a step, `StepRows` (step_rows.py) says from positions which rows each layer runs, `LayerGates`
(gates.py) cut and restore hidden states, `LayerPieces` (compiled.py) runs the layers, `KeyProjection` (projection.py)
leaves a prompt's keys and values, `StepMetadata` (runner.py) builds each layer's attention metadata with the
backend's own builder, and `SkipRunner` (runner.py) ties them to vLLM's model runner. `SkipScheduler` (scheduler.py)
admits by policy and publishes only prompts to the prefix cache; `DepthMetrics` (scheduler.py) reports the layers that
ran.

docs/vllm.md tells how to use it.
"""
