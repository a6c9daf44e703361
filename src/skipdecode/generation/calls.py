"""Calls of tools: how models write them, calls in a text that comes in parts, and the grammar of a call."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from skipdecode.data.chats import Tool, ToolChoice, name_of
from skipdecode.generation.grammar import JSON_OPTIONS


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; empty if it has none."""
    return dict(tool.get("function", tool).get("parameters") or {})


class CallForm(NamedTuple):
    """How a model writes a call: a JSON object with `name` and `arguments` (the key) between `begin` and `end`.

    `begins` matches the begin in a text. Without an end, the calls are the whole text.
    """

    arguments: str
    begin: str
    end: str
    begins: re.Pattern[str]

    @classmethod
    def of(cls, tokenizer: Any, tools: Sequence[Tool]) -> CallForm | None:
        """The form that a chat template asks for: Hermes' and Qwen's, or Llama 3's; None for others."""
        template = str(tokenizer.get_chat_template(tools=list(tools)))
        if "<tool_call>" in template and "<function=" not in template:
            return _HERMES
        return _LLAMA if "<|python_tag|>" in template or "ipython" in template else None

    def grammar(self, calling: ToolChoice, words: Mapping[int, Any]) -> str:
        """A grammar in Lark's syntax: one call, or one and more; `words` are the added tokens."""
        ids = {f"{word}": f"<[{number}]>" for number, word in words.items() if not word.special}

        def lark(text: str) -> str:
            """A text; of `begin` and `end`, what is one token of the model is that token."""
            return " ".join(ids.get(part) or json.dumps(part) for part in re.split(r"(</?tool_call>)", text) if part)

        rules = []
        for place, tool in enumerate(calling.callable):
            given = parameters_of(tool) or {"maxProperties": 0}
            schema = {"type": "object"} | given | {"x-guidance": JSON_OPTIONS}
            begin = f'{self.begin}{{"name": "{name_of(tool)}", "{self.arguments}": '
            rules += [f"c{place}: {lark(begin)} a{place} {lark('}' + self.end)}"]
            rules += [f"a{place}: %json {json.dumps(schema)}"]
        names = " | ".join(f"c{place}" for place in range(len(rules) // 2))
        more = ' ("\\n" call)*' if calling.several and self.end else ""
        return "\n".join([f"start: call{more}", f"call: {names}", *rules])


_HERMES = CallForm("arguments", "<tool_call>\n", "\n</tool_call>", re.compile(r"\s*<tool_call>"))
_LLAMA = CallForm("parameters", "", "", re.compile(r"\A\s*(?=\{)"))


class CallReader:
    """Finds the calls in a text that comes in parts. What is no call of one of the tools stays text.

    A text that begins with `{` is read as Llama's: some models leave out the marks that their template asks for.

    Attribute `count`: calls so far.
    """

    def __init__(self, form: CallForm, calling: ToolChoice) -> None:
        self._form, self._names = form, set(map(name_of, calling.callable))
        self._most = None if calling.several else 1
        self._rest, self._begin, self._whole = "", "", True
        self.count = 0

    def push(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take the next part; returns the text and the calls, in OpenAI's form, that are certain now."""
        self._rest += text
        if self._whole and not self._begin and self._rest.lstrip().startswith("{"):
            self._form = _LLAMA
        said, calls, end = "", [], self._form.end.strip()
        while True:
            found = None if self._begin or not (self._whole or end) else self._form.begins.search(self._rest)
            if found is not None:
                said += self._rest[: found.start()]
                self._begin, self._rest = found[0] or "{", self._rest[found.end() :]
            if not self._begin:
                certain = len(self._rest) if last and not self.count else self._certain(last=last)
                said, self._rest = said + self._rest[:certain], self._rest[certain:]
                break
            inside, closed, rest = self._rest.partition(end) if end else (self._rest, "", "")
            if not closed and not last:
                break
            made = self._calls(inside)
            said += "" if made else self._begin.removesuffix("{") + inside + closed
            calls += made
            self._begin, self._rest, self._whole = "", rest, False
        self._whole = self._whole and not said
        return said, calls

    def _certain(self, *, last: bool) -> int:
        """The number of characters that are no part of a call: neither its begin nor white space beside that."""
        begin, text = "" if last else self._form.begin.strip(), self._rest
        size = next((n for n in range(min(len(begin) - 1, len(text)), 0, -1) if text.endswith(begin[:n])), 0)
        return len(text[: len(text) - size].rstrip())

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """The calls of a text of JSON objects; none if it has anything else."""
        decoder, calls, text = json.JSONDecoder(), [], text.strip()
        while text:
            try:
                call, end = decoder.raw_decode(text)
                name, given = call["name"], call.get("arguments", call.get("parameters", {}))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return []
            if name not in self._names or not isinstance(given, dict):
                return []
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
            text = text[end:].lstrip("; \n")
        calls = calls if self._most is None else calls[: self._most - self.count]
        self.count += len(calls)
        return [{"index": self.count - len(calls) + place, **call} for place, call in enumerate(calls)]
