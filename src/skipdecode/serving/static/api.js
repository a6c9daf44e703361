/** The server's API, as far as this page uses it. Paths are relative to the page. */
import { events } from "./sse.js";

const KEY = "skipdecode-api-key";

/** What went wrong, in words for the person at the page; `status` 0 means that no answer came. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

/** The served model: { id, num_layers, default_schedule, schedules }. */
export async function fetchModel() {
  const answer = await send("v1/models", {});
  const [entry] = (await answer.json()).data;
  return { id: entry.id, ...entry.skipdecode };
}

/**
 * Streams one greedy answer. Yields { tokens } as they come, then { figures } once.
 * `request`: { model, kind: "completion" | "chat", prompt, maxTokens, schedule }.
 */
export async function* stream(request, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const answer = await generate(request, { ...options, skipdecode: { schedule: request.schedule, trace: true } }, signal);
  let whole = false;
  try {
    for await (const data of events(answer.body)) {
      signal.throwIfAborted(); // what has come already would go on otherwise
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      const tokens = chunk.choices.flatMap((choice) => choice.skipdecode?.tokens ?? []);
      if (tokens.length) yield { tokens };
      if (chunk.skipdecode) {
        whole = true;
        yield { figures: chunk.skipdecode };
      }
    }
  } catch (error) {
    throw asApiError(error, "The connection broke off while the text was coming.");
  }
  if (!whole) throw new ApiError(0, "The answer broke off before its end. The server may have been stopped.");
}

/** The figures of the same answer once more, not streamed: this page then takes no time from the model. */
export async function repeat(request, signal) {
  const answer = await generate(request, { skipdecode: { schedule: request.schedule } }, signal);
  return (await answer.json()).skipdecode;
}

function generate({ model, kind, prompt, maxTokens }, options, signal) {
  const chat = kind === "chat";
  const input = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  return send(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, ...input, max_tokens: maxTokens, temperature: 0, ...options }),
    signal,
  });
}

async function send(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    throw asApiError(error, "No answer from the server. Is it still running?");
  }
  if (answer.ok) return answer;
  throw new ApiError(answer.status, await explain(answer));
}

async function explain(answer) {
  if (answer.status === 429) {
    const wait = answer.headers.get("Retry-After");
    return `The server is busy: its queue is full. Try again ${wait ? `in ${wait} s` : "in a moment"}.`;
  }
  if (answer.status === 401) {
    return sessionStorage.getItem(KEY) ? "The server does not accept this API key." : "This server wants an API key.";
  }
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${answer.status}${text ? `: ${text.slice(0, 200)}` : "."}`; // not this API's JSON
  }
}

/** Aborts and errors that are explained already pass as they are; the rest are failures of the network. */
function asApiError(error, message) {
  return error instanceof ApiError || error.name === "AbortError" ? error : new ApiError(0, message);
}
