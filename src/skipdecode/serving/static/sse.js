/** Server-sent events: yields the data of each event of a response's body, as text. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return; // an event without its blank line is incomplete, and is dropped
    buffer += value;
    const blocks = buffer.split(/\r\n\r\n|\n\n/);
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).replace(/^ /, ""));
      if (data.length) yield data.join("\n");
    }
  }
}
