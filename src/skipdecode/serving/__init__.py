"""An OpenAI-compatible server on the package's own engine, for one model on one machine.

A request's life: `Middleware` (middleware.py) checks its key and size -> FastAPI (app.py) validates it against
protocol.py -> `Preprocessor` (preprocessing.py) turns it into token ids, a schedule and a `RequestState`
(request_state.py) -> `ModelWorker` (worker.py), the one thread that owns the model, gives each of its choices a row in
the engine and steps them together, in the loop that `LLM` uses too (generation/loop.py) -> the request's events reach
the event loop -> responses.py writes them as JSON, whole or as a stream.
"""
