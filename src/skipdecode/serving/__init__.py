"""An OpenAI-compatible server on the package's own engine, for one model on one machine.

A request's life: `Guard` (guard.py) checks its key and size -> FastAPI (app.py) validates it against protocol.py ->
`Intake` (intake.py) turns it into token ids, a schedule and a `Ticket` (ticket.py) -> `Worker` (worker.py), the one
thread that owns the model, gives each of its choices a row in a `Lane` (lanes.py: one engine for each order of dropping
layers) and steps them together -> `TextStream` (text_stream.py) makes text of tokens -> the ticket's events reach the
event loop -> replies.py writes them as JSON, whole or as a stream (streaming.py).
"""
