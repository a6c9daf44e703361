"""Calls of tools: how models write them, calls in a text that comes in parts, and the grammar of a call."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from skipdecode.common.types import Tokenizer
from skipdecode.data.chats import Tool, ToolChoice, name_of
from skipdecode.data.records import RecordSettings
from skipdecode.data.stopping import overlap
from skipdecode.errors import UsageError
from skipdecode.generation.grammar import JSON_OPTIONS


class Call(TypedDict):
    """A call in OpenAI's form; `function` has the name of a tool, and its arguments as JSON text."""

    index: int
    id: str
    type: str
    function: dict[str, str]


def parameters_of(tool: Tool) -> dict[str, object]:
    """Return the JSON schema of a tool's arguments; empty if it has none."""
    return dict(tool.get("function", tool).get("parameters") or {})


class CallForm(NamedTuple):
    """How a model writes a call: a JSON object with `name` and `arguments` (the key) between `begin` and `end`.

    `mark` announces calls in a text. Without an end, they are all that follows.
    """

    arguments: str
    begin: str
    end: str
    mark: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: Sequence[Tool]) -> CallForm | None:
        """Return the form that a chat template asks for: Hermes' and Qwen's, or Llama 3's; None for others."""
        template = str(tokenizer.get_chat_template(tools=list(tools)))
        if "<tool_call>" in template and "<function=" not in template:
            return _HERMES
        return _LLAMA if "<|python_tag|>" in template or "ipython" in template else None

    def grammar(self, calling: ToolChoice, tokenizer: Tokenizer) -> str:
        """Make a grammar in Lark's syntax: one call, or one and more."""
        added = tokenizer.added_tokens_decoder.items()
        ids = {str(token): f"<[{number}]>" for number, token in added if not token.special}

        def lark(text: str) -> str:
            """Source of a literal; a marker that is a single token becomes a reference to the token."""
            return " ".join(ids.get(part) or json.dumps(part) for part in re.split(r"(</?tool_call>)", text) if part)

        rules = []
        for index, tool in enumerate(calling.callable):
            parameters = parameters_of(tool) or {"maxProperties": 0}
            schema = {"type": "object"} | parameters | {"x-guidance": JSON_OPTIONS}
            begin = f'{self.begin}{{"name": "{name_of(tool)}", "{self.arguments}": '
            rules += [f"c{index}: {lark(begin)} a{index} {lark('}' + self.end)}"]
            rules += [f"a{index}: %json {json.dumps(schema)}"]
        names = " | ".join(f"c{index}" for index in range(len(calling.callable)))
        more = ' ("\\n" call)*' if calling.several and self.end else ""
        return "\n".join([f"start: call{more}", f"call: {names}", *rules])


_HERMES = CallForm("arguments", "<tool_call>\n", "\n</tool_call>", "<tool_call>")
_LLAMA = CallForm("parameters", "", "", "<|python_tag|>")
_TO_END = re.compile(r'((?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!/tool_call>))*+)</tool_call>', re.DOTALL)
"""A text up to the first end mark that is outside of JSON strings."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def call_form(settings: RecordSettings | None, tokenizer: Tokenizer) -> CallForm | None:
    """Return how the model calls the tools of a line of OpenAI's batches; None without tools or a known form.

    Raises UsageError: the line demands a call, and there is no known form.
    """
    if settings is None or not settings.calling.shown:
        return None
    form = CallForm.of(tokenizer, settings.calling.shown)
    if form is None and settings.calling.demanded:
        raise UsageError("tool_choice demands a call, which this model's chat template has no known form for")
    return form


class CallReader:
    """Finder of calls in a text that comes in parts. What is no call of one of the tools stays text.

    A text of nothing but calls needs no mark, as Llama writes them: some models leave out the marks that their template
    asks for.

    Attribute `count`: calls so far.
    """

    def __init__(self, form: CallForm, calling: ToolChoice) -> None:
        self._form, self._names = form, set(map(name_of, calling.callable))
        self._most = None if calling.several else 1
        self._rest = ""  # not handed out yet
        self._at_start = True  # nothing was handed out yet
        self.count = 0

    def push(self, text: str, *, last: bool) -> tuple[str, list[Call]]:
        """Take the next part; returns the text and the calls, in OpenAI's form, that are certain now.

        Together they are the same, however the text is divided.
        """
        self._rest += text
        if self._at_start and self._rest.lstrip().startswith("{"):
            calls = self._calls(self._rest) if last else []
            if calls or not last:
                return "", calls
        text, calls = self._marked(last=last)
        self._at_start = self._at_start and not text and not calls
        return text, calls

    def _marked(self, *, last: bool) -> tuple[str, list[Call]]:
        """Take the text and the calls with marks that are certain now out of what was not handed out yet."""
        plain, calls, mark = "", list[Call](), self._form.mark
        while (start := self._rest.find(mark)) >= 0:
            before, behind = self._rest[:start], self._rest[start + len(mark) :]
            inside, after = self._candidate(behind, last=last)
            if inside is None:
                break
            if calls_inside := self._calls(inside):
                plain, calls, self._rest = plain + before.rstrip(), calls + calls_inside, after
            else:
                plain, self._rest = plain + before + mark, behind
        if start < 0:
            start = len(self._rest) - (0 if last else overlap(self._rest, mark))
        if self.count or not last:  # white space beside a call goes
            start = len(self._rest[:start].rstrip())
        plain, self._rest = plain + self._rest[:start], self._rest[start:]
        return plain, calls

    def _candidate(self, text: str, *, last: bool) -> tuple[str | None, str]:
        """Split a text behind a mark at the end mark; None in place of the first part: the end is still to come."""
        closed = _TO_END.match(text) if self._form.end else None
        if closed is not None:
            return closed[1], text[closed.end() :]
        if not last and text.lstrip()[:1] in ("", "{"):
            return None, text
        return text[: len(text) - overlap(text, self._form.end.strip())], ""

    def _calls(self, text: str) -> list[Call]:
        """Read the calls of a text of JSON objects; none if it has anything else."""
        functions, text = list[dict[str, str]](), text.strip()
        while text:
            try:
                call, end = json.JSONDecoder().raw_decode(text)
                functions.append(self._function(call))
            except (ValueError, RecursionError):
                return []
            text = text[end:].lstrip("; \n")
        if self._most is not None:
            functions = functions[: self._most - self.count]
        calls: list[Call] = [
            {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            for index, function in enumerate(functions, self.count)
        ]
        self.count += len(calls)
        return calls

    def _function(self, call: object) -> dict[str, str]:
        """Read the name of a tool and its arguments; raises ValueError: this is no call of one of the tools."""
        if not isinstance(call, dict):
            raise ValueError("no object")
        name = call.get("name")
        if not isinstance(name, str) or name not in self._names:
            raise ValueError("no tool has this name")
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # as some models write them
            arguments = json.loads(arguments or "{}")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no object")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return {"name": name, "arguments": _HALF_PAIR.sub("\ufffd", text)}
