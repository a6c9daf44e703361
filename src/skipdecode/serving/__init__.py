"""An OpenAI-compatible HTTP server over a continuous batch; docs/architecture.md follows a request through it."""
