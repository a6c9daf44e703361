"""Logs as JSON, one object a line, on standard error. Prompts and texts are no part of them."""

from __future__ import annotations

import json
import logging
import time
import traceback
from typing import Any

__all__ = ["JsonFormatter", "log_config"]


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `logger`, `message`, the record's `fields`, and of an error the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def log_config(level: str) -> dict[str, Any]:
    """For `logging.config.dictConfig` and uvicorn."""
    handler = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "json"}
    plain = {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonFormatter}},
        "handlers": {"stderr": handler},
        "loggers": dict.fromkeys(("skipdecode.serve", "uvicorn"), plain),
    }
