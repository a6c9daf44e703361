"""An OpenAI-compatible HTTP server over a continuous batch.

The way of a request: `Middleware` (middleware.py) -> FastAPI and a pydantic model (app.py, protocol.py) ->
`Preprocessor` (preprocessing.py) checks it against the `ServedModel` (served_model.py) and makes its sequences ->
`ModelWorker` (worker.py), the one thread that owns the model, gives each sequence a row in the engine and steps them
together, with the `TextLoop` that `LLM` uses too (generation/loop.py) -> the events reach the event loop through the
request's `StreamState` (stream_state.py) -> `ResponseBuilder` (responses.py) makes the answer of them.
"""
