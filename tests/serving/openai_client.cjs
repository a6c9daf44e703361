// OpenAI's client for JavaScript against a running server; prints what it found as JSON (test_serve_clients.py).
const OpenAI = require("openai");
const [plain, tools] = process.argv.slice(2).map((baseURL) => new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }));
const { messages, tool, schema, max_tokens } = JSON.parse(process.env.GIVEN);
const asked = { model: "tiny", messages, temperature: 0 };
(async () => {
  const found = { models: (await plain.models.list()).data.map((model) => model.id), streamed: "", usage: null };
  const text = await plain.completions.create({ model: "tiny", prompt: "hello", temperature: 0, max_tokens });
  found.text = text.choices[0].text;
  found.chat = (await plain.chat.completions.create({ ...asked, max_tokens })).choices[0].message.content;
  const options = { max_tokens, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await plain.chat.completions.create({ ...asked, ...options })) {
    found.streamed += chunk.choices[0]?.delta.content ?? "";
    found.usage = chunk.usage ?? found.usage;
  }
  const response_format = { type: "json_schema", json_schema: { name: "a", schema, strict: true } };
  found.parsed = (await plain.chat.completions.parse({ ...asked, response_format })).choices[0].message.parsed;
  const demanded = { ...asked, tools: [tool], tool_choice: "required", max_tokens: 300 };
  const called = await tools.chat.completions.create(demanded);
  found.call = called.choices[0].message.tool_calls[0].function;
  const extra = { skipdecode: { schedule: "nested", trace: true } };
  found.schedule = (await plain.chat.completions.create({ ...asked, max_tokens: 2, ...extra })).skipdecode.schedule;
  const refused = plain.chat.completions.create({ ...asked, bad_words: ["a"] });
  found.refused = await refused.catch((error) => [error.status, error.code, error.param]);
  console.log(JSON.stringify(found));
})();
